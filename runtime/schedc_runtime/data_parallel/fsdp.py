"""FSDP2 around the dense part of a stage: parameters and gradients sharded over its replicas, gathered for a step.

    GATHER  START   ahead of the first use      an all-gather leaves
            JOIN    right before it             the stage has whole parameters
    SCATTER START   behind the last use         the gradients leave for the replicas that sum them
            JOIN    later                       every replica has the sum of its shard
    DROP            behind that START           the whole parameters are freed

torch's `fully_shard` does all of it, driven from the instruction stream. FSDP's own hooks are removed: they expect a
forward and a backward of the whole module, while a stage runs segment by segment with deferred weight gradients. Shards
are summed in the order of replicas, as in `schedc_runtime.data_parallel.gradient_sums`, hence with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from schedc.ir.program import Program
from schedc_runtime.data_parallel.mixed_lists import let_optimizers_take_shards
from schedc_runtime.data_parallel.stage_replicas import Sharding, kept_whole
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.transport.base import TransportError
from schedc_runtime.transport.collective_calls import ordered_sum
from schedc_runtime.transport.distributed import plain_text
from schedc_runtime.transport.process_groups import join_groups


class _Scattered(NamedTuple):
    """A reduce-scatter on its way. work: torch's handle. sent: [elements] must outlive the work.

    received: [members, share]. summed: [share] where the sum belongs.
    """

    work: Any
    sent: Tensor
    received: Tensor
    summed: Tensor


class OrderedReduceScatter:
    """FSDP2's reduce-scatter with the parts added in the order of members, which torch's own leaves open.

    The call starts it, and `finish` adds up what has arrived. at_once: whether the call itself finishes, as FSDP2
    needs where it converts or adds to the sums.
    """

    def __init__(self) -> None:
        self.at_once = False
        self._scattered: list[_Scattered] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor of shape ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor).view(dist.get_world_size(group), -1)
        work = dist.all_to_all_single(received.view(-1), input_tensor, group=group, async_op=True)
        self._scattered.append(_Scattered(work, input_tensor, received, output_tensor))
        if self.at_once:
            self.finish()

    def finish(self) -> None:
        """Put the sums where FSDP2 expects them. On a GPU the compute stream waits, and not the host."""
        for each in self._scattered:
            each.work.wait()
            each.summed.copy_(ordered_sum(each.received))
        self._scattered = []

    def reset(self) -> None:
        """Forget the sums in flight."""
        self._scattered = []


class DenseShards:
    """The parts of one stage's module that `fully_shard` has sharded; parameters are whole until the first `drop`.

    Every sharded part has its parameters gathered and freed by the instruction stream alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [cast(Any, part) for part in module.modules() if isinstance(part, FSDPModule)]
        self._states = [part._get_fsdp_state() for part in self._parts]
        self._handles: list[Any] = []
        self._sums = OrderedReduceScatter()
        for state in self._states:
            for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
                handle.remove()
        self._roots: list[tuple[Any, Any]] = []
        for part, state in zip(self._parts, self._states, strict=True):
            if state._is_root is None:  # the first of a tree makes the rest its own
                state._lazy_init()
                self._roots.append((part, state))
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # the loss has been divided by the number of replicas
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)  # replicas may differ in what got a gradient
            part.set_reshard_after_backward(False)  # DROP frees the parameters
        for state in self._states:
            for group in state._fsdp_param_groups:
                group._reduce_scatter_comm = self._sums  # the setter serves a single group of parameters
        self.parameters = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
        """The shards, as the module has them between steps."""
        for parameter in self.parameters:
            parameter.dense_shard = True  # type: ignore[attr-defined]
        self.start_gather()
        self.join_gather()

    @classmethod
    def over(cls, module: nn.Module, mesh: DeviceMesh, kept: set[nn.Parameter]) -> DenseShards:
        """The whole module sharded over ``mesh``, in a group for each type of its parameters.

        kept: parameters that stay whole: experts, and those that other stages of the rank use, too.
        """
        if any(parameter not in kept for parameter in module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=kept)
            _split_by_type(cast(Any, module)._get_fsdp_state())
        return cls(module)

    def start_gather(self) -> int:
        """Start making the parameters whole (all-gather); returns their bytes. A collective of the replicas."""
        self._handles = [part.unshard(async_op=True) for part in self._parts]
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    def join_gather(self) -> None:
        """Let the stage compute on whole parameters from here on."""
        handles, self._handles = self._handles, []
        for handle in handles:
            _translated(handle.wait, "gathering parameters")

    def drop(self) -> None:
        """Free the whole parameters; the module has this replica's shards again."""
        for part in self._parts:
            part.reshard()

    def start_reduce(self) -> int:
        """Send the replicas the gradients that they sum; returns the bytes of the gradients. A collective."""
        for state in self._states:
            for group in state._fsdp_param_groups:
                self._sums.at_once = not _is_plain(group)
                group.post_backward()
        return sum(p.numel() * p.element_size() for p in self.parameters if p.requires_grad)

    def join_reduce(self) -> None:
        """Put the sum of this replica's shard into its gradients."""
        _translated(self._sums.finish, "summing gradients of shards")
        for _, root in self._roots:
            root._root_post_backward_final_callback()

    def ready(self) -> bool:
        """Whether a join would not block this process for ever: other replicas have other processes."""
        return True

    def reset(self) -> None:
        """Forget the step, and free whole parameters."""
        self._handles = []
        self._sums.reset()
        for state in self._states:
            for group in state._fsdp_param_groups:
                group._all_gather_result = None  # its collective may never end
        for part, _ in self._roots:
            part.reset_iter_state()


def _split_by_type(state: Any) -> None:
    """Give each type of parameters a group of its own: FSDP2 sends the gradients of a group as one tensor."""
    (group,) = state._fsdp_param_groups
    by_type: dict[torch.dtype, list[Any]] = {}
    for parameter in group.fsdp_params:
        by_type.setdefault(parameter.sharded_param.dtype, []).append(parameter)
    if len(by_type) == 1:
        return
    state._fsdp_param_groups.clear()
    for parameters in by_type.values():
        part = copy(group)
        part.fsdp_params = parameters
        part._module_to_pre_save_state_dict_hook_handle = {}
        part._module_to_pre_load_state_dict_hook_handle = {}
        state._fsdp_param_groups.append(part)


def _is_plain(group: Any) -> bool:
    """Whether the sums of a group are the gradients of its shards, which have none yet: nothing reads them at once."""
    converted = any(each.param_dtype or each.reduce_dtype for each in group.fsdp_params)
    added = any(each.sharded_param.grad is not None for each in group.fsdp_params)
    return not (converted or added or group._is_hsdp or isinstance(group.offload_policy, CPUOffloadPolicy))


def _translated(call: Callable[[], Any], what: str) -> None:
    """Call it; a broken connection becomes a `TransportError`."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TransportError(f"{what}: {plain_text(error)}") from None


class DenseSharding(Sharding[DenseShards]):
    """By FSDP2 (``shard_dense`` of a `Mesh`). timeout: seconds that a collective may take."""

    def __init__(self, program: Program, mesh: Mesh, timeout: float) -> None:
        super().__init__(program, mesh)
        let_optimizers_take_shards()
        self.mesh, self.timeout = mesh, timeout
        self._group: dist.ProcessGroup | None = None

    def take(
        self, place: Coordinate, modules: Sequence[nn.Module], device: torch.device, tied: Iterable[nn.Parameter] = ()
    ) -> None:
        parts = [self.mesh.replicas_of(Coordinate(rank, 0)) for rank in range(self.mesh.pipeline)]
        # Every process is in one group: there are replicas.
        self._group = group = cast(dist.ProcessGroup, join_groups(parts, self.timeout))
        across = DeviceMesh.from_group(group, device.type)
        kept = kept_whole(modules, tied)
        for module in modules:
            self._shards[id(module)] = DenseShards.over(module, across, kept & set(module.parameters()))

    def adopt(self, modules: Sequence[nn.Module]) -> None:
        """Take over modules in which a user has called `fully_shard`, over the replicas of their rank."""
        for module in modules:
            self._shards[id(module)] = DenseShards(module)

    def take_groups(self) -> list[dist.ProcessGroup]:
        # Over gloo replicas that wait for this one do so up to the timeout.
        group, self._group = self._group, None
        return [] if group is None else [group]

    def parts_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameters = dict(module.named_parameters())
        local: dict[str, Tensor] = {}
        for name, value in state.items():
            own = parameters.get(name)
            if isinstance(own, DTensor) and not isinstance(value, DTensor):
                value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
            local[name] = value
        return local
