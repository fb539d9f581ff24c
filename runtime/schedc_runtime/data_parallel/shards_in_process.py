"""Shards of the dense part of a stage among replicas in one process: the work of FSDP2, over in-process communicators.

    between steps      a parameter's data is this replica's rows, and so is its gradient
    GATHER .. DROP     its data is the whole parameter

FSDP2 needs a process per replica. As there, rows are cut along the first axis, and what has no gradient counts as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.ir.program import Program
from schedc_runtime.data_parallel.stage_replicas import Sharding, kept_whole
from schedc_runtime.ranks.mesh import Coordinate, Mesh, PeerGroups
from schedc_runtime.transport.collective_calls import Communicator


class ShardedParameter:
    """A parameter of a stage of which a replica holds some rows. rows: [members] how many each replica holds."""

    def __init__(self, parameter: nn.Parameter, member: int, members: int) -> None:
        self.parameter, self.shape = parameter, parameter.shape
        parameter.whole_form = self.shape, parameter.stride()  # type: ignore[attr-defined]  # for recordings
        count = self.shape[0] if parameter.dim() else 1
        longest = -(-count // members)
        self.rows = [max(0, min(longest, count - longest * number)) for number in range(members)]
        self.longest = longest * (parameter.numel() // max(1, count))
        """Elements of the longest part."""
        self.data = self.part(parameter.data, member)
        """[rows, ...] what this replica holds."""
        self.gradient: Tensor | None = None
        """[rows, ...] the sum of this step, until the parameter is a shard again."""

    def part(self, whole: Tensor, member: int) -> Tensor:
        """[rows, ...] a copy of the rows of a member."""
        return self.parts(whole)[member].clone()

    def parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """[members] the rows of each member."""
        return torch.split(whole if whole.dim() else whole.view(1), self.rows)

    def padded(self, part: Tensor) -> Tensor:
        """[longest] the elements of a part, then zeros."""
        flat = part.reshape(-1)
        return flat if flat.numel() == self.longest else torch.cat([flat, flat.new_zeros(self.longest - flat.numel())])


class InProcessShards:
    """The sharded parameters of one stage of one replica. They are whole until the first `drop`."""

    def __init__(self, parameters: Sequence[nn.Parameter], communicator: Communicator) -> None:
        self.communicator, self.parameters = communicator, list(parameters)
        self.groups: dict[torch.dtype, list[ShardedParameter]] = {}
        for parameter in parameters:
            parameter.dense_shard = True  # type: ignore[attr-defined]
            sharded = ShardedParameter(parameter, communicator.rank, communicator.size)
            self.groups.setdefault(parameter.dtype, []).append(sharded)
        self._gathers: list[Any] = []
        self._sums: list[Any] = []
        self._whole = True

    def ready(self) -> bool:
        """Whether a join would not give control to another replica."""
        return all(self.communicator.ready(handle) for handle in (*self._gathers, *self._sums))

    def start_gather(self) -> int:
        """Start making the parameters whole; returns their bytes."""
        size = 0
        for group in self.groups.values():
            for each in group:
                each.data = each.parameter.data
            flat = torch.cat([each.padded(each.data) for each in group])
            self._gathers.append(self.communicator.all_gather(flat))
            size += sum(each.shape.numel() * flat.element_size() for each in group)
        return size

    def join_gather(self) -> None:
        """Let the stage compute on whole parameters from here on."""
        for group, handle in zip(self.groups.values(), self._taken(self._gathers), strict=True):
            gathered = torch.split(self.communicator.wait(handle), [each.longest for each in group], dim=1)
            for each, parts in zip(group, gathered, strict=True):
                each.parameter.data = parts.reshape(-1)[: each.shape.numel()].view(each.shape)
        self._whole = True

    def drop(self) -> None:
        """Free the whole parameters."""
        self._whole = False
        for each in self.each():
            each.parameter.data = each.data
        self._put_gradients()

    def start_reduce(self) -> int:
        """Send the replicas the gradients that they sum; returns the bytes of the gradients."""
        size = 0
        for group in self._trained():
            wholes = [torch.zeros_like(x.parameter) if x.parameter.grad is None else x.parameter.grad for x in group]
            parts = zip(*(each.parts(whole) for each, whole in zip(group, wholes, strict=True)), strict=True)
            flat = torch.cat([each.padded(part) for of in parts for each, part in zip(group, of, strict=True)])
            self._sums.append(self.communicator.reduce_scatter(flat))
            size += flat.nbytes
            for each in group:
                each.parameter.grad = None
        return size

    def join_reduce(self) -> None:
        """Keep the sum of this replica's rows as their gradients."""
        for group, handle in zip(self._trained(), self._taken(self._sums), strict=True):
            sums = torch.split(self.communicator.wait(handle), [each.longest for each in group])
            for each, flat in zip(group, sums, strict=True):
                each.gradient = flat[: each.data.numel()].view(each.data.shape).clone()
        self._put_gradients()

    def reset(self) -> None:
        """Forget the step, and free whole parameters."""
        self._gathers, self._sums = [], []
        for each in self.each():
            each.gradient = each.parameter.grad = None
        self.drop()

    def whole_of(self, parts: Sequence[InProcessShards]) -> dict[int, Tensor]:
        """The whole parameters, by the id of this replica's. parts: [replicas] the same stage's shards."""
        same = zip(*(list(shards.each()) for shards in parts), strict=True)
        return {
            id(mine.parameter): torch.cat([x.data for x in each]).view(mine.shape)
            for mine, each in zip(self.each(), same, strict=True)
        }

    def _put_gradients(self) -> None:
        """Give shards the sums that have arrived. A whole parameter cannot have the gradient of a shard."""
        if not self._whole:
            for each in self.each():
                if each.gradient is not None:
                    each.parameter.grad, each.gradient = each.gradient, None

    def each(self) -> Iterable[ShardedParameter]:
        """The parameters, type by type."""
        return (each for group in self.groups.values() for each in group)

    def _trained(self) -> list[list[ShardedParameter]]:
        groups = ([each for each in group if each.parameter.requires_grad] for group in self.groups.values())
        return [group for group in groups if group]

    @staticmethod
    def _taken(handles: list[Any]) -> list[Any]:
        taken = list(handles)
        handles.clear()
        return taken


class InProcessSharding(Sharding[InProcessShards]):
    """The shards of all replicas, which are in this process."""

    def __init__(self, program: Program, mesh: Mesh, peer_groups: Mapping[Coordinate, PeerGroups]) -> None:
        super().__init__(program, mesh)
        self._peer_groups = peer_groups

    def take(
        self, place: Coordinate, modules: Sequence[nn.Module], device: torch.device, tied: Iterable[nn.Parameter] = ()
    ) -> None:
        kept, replicas = kept_whole(modules, tied), self._peer_groups[place].replicas
        for module in modules:
            parameters = [parameter for parameter in module.parameters() if parameter not in kept]
            self._shards[id(module)] = InProcessShards(parameters, replicas)

    def take_groups(self) -> list[dist.ProcessGroup]:
        return []

    def joined(self, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
        """The whole tensors of a stage by name. modules: [replicas] those of the stage."""
        wholes = self.of(modules[0]).whole_of([self.of(module) for module in modules])
        return {
            name: wholes[id(parameter)]
            for name, parameter in modules[0].named_parameters(remove_duplicate=False)
            if id(parameter) in wholes
        }

    def parts_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mine = {id(each.parameter): each for each in self.of(module).each()}
        rank = self.of(module).communicator.rank
        rows = {
            name: mine[id(parameter)].part(state[name], rank)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name in state and id(parameter) in mine
        }
        return dict(state) | rows
