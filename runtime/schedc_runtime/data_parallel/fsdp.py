"""FSDP2 around the dense part of a stage: parameters and gradients sharded over its replicas, gathered for a step.

    first instruction of a stage    all-gather: the stage computes on whole parameters
    last weight gradients           reduce-scatter: every replica keeps the sum of its shard; the parameters are freed

torch's `fully_shard` does both, driven from the instruction stream. FSDP's own hooks are removed: they expect a forward
and a backward of the whole module, while a stage runs segment by segment with deferred weight gradients. Shards are
summed in the order of replicas, as in `schedc_runtime.data_parallel.gradient_sums`, hence with the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from schedc.ir.program import InstructionKind, Program
from schedc_runtime.data_parallel.gradient_sums import is_expert
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.code import Call, Code
from schedc_runtime.execute.registers import Registers
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.collectives import ordered_sum
from schedc_runtime.transport.process_groups import join_groups


class OrderedReduceScatter:
    """FSDP2's reduce-scatter with the parts added in the order of members, which torch's own leaves open."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor of shape ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(ordered_sum(received.view(dist.get_world_size(group), -1)))


class DenseShards:
    """The parts of one stage's module that `fully_shard` has sharded; parameters are whole until the first `shard`.

    Every sharded part has its parameters gathered and freed by the instruction stream alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [cast(Any, part) for part in module.modules() if isinstance(part, FSDPModule)]
        self._states = [part._get_fsdp_state() for part in self._parts]
        for state in self._states:
            for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
                handle.remove()
        self._roots = []
        for state in self._states:
            if state._is_root is None:  # the first of a tree makes the rest its own
                state._lazy_init()
                self._roots.append(state)
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # the loss has been divided by the number of replicas
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_reduce_scatter(OrderedReduceScatter())
            part.set_reduce_scatter_unused_params(True)  # replicas may differ in what got a gradient
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                parameter.dense_shard = True  # type: ignore[attr-defined]
        self.gather()

    @classmethod
    def over(cls, module: nn.Module, mesh: DeviceMesh, kept: set[nn.Parameter]) -> DenseShards:
        """The whole module sharded over ``mesh``. kept: parameters that stay whole: experts, and those that other
        stages of the rank use, too."""
        mine = [parameter for parameter in module.parameters() if parameter not in kept]
        if len(kinds := {parameter.dtype for parameter in mine}) > 1:
            raise RuntimeFault(
                f"a stage has dense parameters of {len(kinds)} types, which FSDP2 cannot send as one",
                "give all dense parameters one type, or leave shard_dense out of the mesh",
            )
        if mine:
            fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=kept)
        return cls(module)

    def gather(self) -> None:
        """Make the parameters whole (all-gather). A collective of the replicas."""
        for part in self._parts:
            part.unshard()

    def shard(self) -> None:
        """Free the whole parameters; the module has this replica's shards again."""
        for part in self._parts:
            part.reshard()

    def reduce(self) -> None:
        """Sum the gradients over the replicas, each of which keeps its shard; then `shard`. A collective."""
        for state in self._states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        for root in self._roots:
            root._root_post_backward_final_callback()
        self.shard()


class DenseSharding:
    """The sharded dense parts of all stages of a process (``shard_dense`` of a `Mesh`).

    Raises `RuntimeFault` where they cannot be sharded: in one process, without replicas, with two copies of a stage.
    """

    def __init__(self, program: Program, mesh: Mesh, places: Sequence[Coordinate], in_process: bool) -> None:
        refusals = [
            (in_process, "all ranks are in this process", "start one process per rank"),
            (mesh.replicas == 1, "the mesh has one replica", "give a mesh with experts= or data="),
            (
                bool(((program.kind == InstructionKind.REDUCE) & (program.stage2 < 0)).any()),
                f"{program.name} holds two copies of every stage",
                "take a schedule with one, as dualpipev in place of dualpipe",
            ),
        ]
        for refused, why, help in refusals:
            if refused:
                raise RuntimeFault(f"the dense part cannot be sharded: {why}", help)
        self.mesh, self.places = mesh, places
        self._shards: dict[int, DenseShards] = {}
        """The shards of each stage, by the id of its module."""

    def take(
        self, place: Coordinate, modules: Sequence[nn.Module], device: torch.device, tied: Iterable[nn.Parameter] = ()
    ) -> None:
        """Shard the dense parameters of a place's modules over its replicas. A collective of the replicas.

        Experts stay as they are, and so do parameters that several stages of the place share, or that are ``tied`` to
        stages of other ranks. All are whole until `shard`.
        """
        parts = [self.mesh.replicas_of(Coordinate(rank, 0)) for rank in range(self.mesh.pipeline)]
        group = cast(dist.ProcessGroup, join_groups(parts, 300.0))  # every process is in one: there are replicas
        across = DeviceMesh.from_group(group, device.type)
        uses = Counter(parameter for module in modules for parameter in set(module.parameters()))
        kept = {parameter for parameter, count in uses.items() if count > 1 or is_expert(parameter)} | set(tied)
        for module in modules:
            self._shards[id(module)] = DenseShards.over(module, across, kept & set(module.parameters()))

    def adopt(self, modules: Sequence[nn.Module]) -> None:
        """Take over modules in which a user has called `fully_shard`, over the replicas of their rank."""
        for module in modules:
            self._shards[id(module)] = DenseShards(module)

    def shard(self) -> None:
        """Free the whole parameters of all stages, once the pipeline is built."""
        for shards in self._shards.values():
            shards.shard()

    def around(self, code: Code, program: Program, stages: Mapping[int, Stage]) -> Code:
        """The code of a place with `with_shards`, in training with the sums of gradients. stages: of the place."""
        shards = {index: self._shards[id(stage.module)] for index, stage in stages.items()}
        training = bool(np.isin(program.kind, (InstructionKind.B, InstructionKind.W, InstructionKind.CELL)).any())
        return with_shards(code, shards, training=training)

    @staticmethod
    def whole(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict with whole tensors in place of shards. A collective of the replicas if it has shards."""
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}

    @staticmethod
    def parts_of(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of whole tensors as ``module`` loads it: with this replica's shard of sharded parameters."""
        parameters = dict(module.named_parameters())
        local: dict[str, Tensor] = {}
        for name, value in state.items():
            own = parameters.get(name)
            if isinstance(own, DTensor) and not isinstance(value, DTensor):
                value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
            local[name] = value
        return local


def with_shards(code: Code, shards: Mapping[int, DenseShards], *, training: bool) -> Code:
    """The code of a place whose stages gather their parameters before their first use and shard them after the last.

    shards: by stage index. training: whether gradients are summed before the parameters are sharded.
    """
    before: dict[int, list[Call]] = {}
    after: dict[int, list[Call]] = {}
    for stage, positions in sorted(_uses(code).items()):
        before.setdefault(positions[0], []).append((_gather, shards[stage]))
        after.setdefault(positions[-1], []).append((_reduce if training else _shard, shards[stage]))
    return code.woven(before, after)


def _uses(code: Code) -> dict[int, list[int]]:
    """The positions of the steps that compute on each stage, ascending."""
    uses: dict[int, list[int]] = {}
    for position, step in enumerate(code.steps):
        if step.instruction.computes:
            for stage in set(step.instruction.stages):
                uses.setdefault(stage, []).append(position)
    return uses


def _gather(registers: Registers, shards: DenseShards) -> None:
    shards.gather()


def _reduce(registers: Registers, shards: DenseShards) -> None:
    shards.reduce()


def _shard(registers: Registers, shards: DenseShards) -> None:
    shards.shard()
