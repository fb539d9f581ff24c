"""Stages that several ranks hold, copies of `dualpipe` and replicas: compared, their running statistics kept equal.

Every so many steps, and where a state was loaded, checksums of all such parameters are added up by group of ranks.
Names travel only where two groups differ.

A batch norm updates its running mean by `new = (1 - momentum) * old + momentum * batch`. Copies that begin equal and
see different microbatches end in different values. After h updates a copy holds `(1 - momentum)**h * old + change`. One
rank that runs the microbatches of copy A, then those of copy B, therefore ends with
`B + (1 - momentum)**h_B * (A - old)`. All ranks compute this in one order, and so keep equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from schedc_runtime.data_parallel.gradient_sums import is_dense_shard, is_expert, is_part
from schedc_runtime.errors import RanksDisagree, RuntimeFault
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.pipeline.agree.contents import HostNumbers, checksum
from schedc_runtime.pipeline.agree.step_facts import odd_ranks
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.attendance import Alike
from schedc_runtime.ranks.control import ControlPlane, Unlike
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.transport.base import Transfer


class _Copy(NamedTuple):
    """A parameter here. members: processes with an equal copy."""

    place: Coordinate
    members: tuple[int, ...]
    name: str
    parameter: nn.Parameter


class _Looked(NamedTuple):
    """Copies and their checksums, as of a step."""

    copies: list[_Copy]
    numbers: HostNumbers


class StageCopies:
    """The copies in this process. every: number of training steps from one comparison to the next; 0: none."""

    def __init__(self, assembly: Assembly, control: ControlPlane, every: int) -> None:
        self._assembly, self._control = assembly, control
        self._copied = assembly.mesh.peers > 1 or len(assembly.program.placement.rank_of_stage) > 1
        self.compare_every(every)
        self._loads = -1
        self._looked: _Looked | None = None

    def compare_every(self, every: int) -> None:
        """Compare in every so many training steps from now on; 0: never."""
        self._every = every if self._copied else 0

    def loaded(self, training: bool) -> bool:
        """Whether a training step begins, and a state may have been loaded here since the last one."""
        return bool(training and self._every and self._loads != self._assembly.weights.loads)

    def begin(self, steps: int, loaded: bool) -> None:
        """A training step begins. A collective at some steps. Raises `RanksDisagree` on every rank alike.

        steps: training steps before. loaded: whether a state may have been loaded on any rank. On a GPU the checksums
        of a step are compared when the next one begins; where a state was loaded the device is waited for.
        """
        before, self._looked = self._looked, None
        self._loads = self._assembly.weights.loads
        if self._every and (loaded or steps % self._every == 0):
            copies = list(self._copies())
            self._looked = _Looked(copies, HostNumbers(checksum(copy.parameter, steps) for copy in copies))
        if before is not None:
            self._compare(before)
        if self._looked is not None and (loaded or self._assembly.device.type == "cpu"):
            looked, self._looked = self._looked, None
            self._compare(looked)

    def _compare(self, looked: _Looked) -> None:
        mesh = self._assembly.mesh
        by_members: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        told: dict[str, dict[str, int]] = {}
        for copy, number in zip(looked.copies, looked.numbers.read(), strict=True):
            by_members.setdefault(copy.members, []).append((copy.name, number))
            told.setdefault(mesh.name(copy.place), {})[f"{copy.members[0]} {copy.name}"] = number
        if self._control.alone:
            _check([told])
            return
        alike = [Alike(numbers, members) for members, numbers in by_members.items()]
        try:
            self._control.fold("comparing copies", None, lambda sent: None, alike=alike, details=lambda: told)
        except Unlike as unlike:
            _check(unlike.details)

    def _copies(self) -> Iterator[_Copy]:
        """The parameters of the stages here that other ranks hold, too."""
        mesh, placement = self._assembly.mesh, self._assembly.program.placement
        for place in self._assembly.places:
            for index, stage in sorted(self._assembly.stages[place].items()):
                holders = sorted(set(placement.rank_of_stage[:, index].tolist()))
                for name, parameter in stage.module.named_parameters():
                    same = _same(parameter, place, mesh)
                    members = [process + (rank - place.pipeline) * mesh.peers for rank in holders for process in same]
                    if len(members) > 1:
                        yield _Copy(place, tuple(sorted(members)), name, parameter)


def _same(parameter: nn.Parameter, place: Coordinate, mesh: Mesh) -> Sequence[int]:
    """The processes with the stages of ``place`` that hold equal values of a parameter."""
    if isinstance(parameter, DTensor) or is_dense_shard(parameter):
        return [mesh.process(place)]
    if is_expert(parameter):
        return mesh.holding_the_same(place)
    return mesh.splitting_the_same(place) if is_part(parameter) else mesh.replicas_of(place)


def _check(everyone: Sequence[Mapping[str, Mapping[str, int]]]) -> None:
    """Raise `RanksDisagree` where copies differ. everyone: [processes] by rank, checksums by group and name."""
    numbers: dict[str, dict[str, int]] = {}
    for process in everyone:
        for rank, by_name in process.items():
            for name, number in by_name.items():
                numbers.setdefault(name, {})[rank] = number
    different = [name for name, by_rank in numbers.items() if len(set(by_rank.values())) > 1]
    if different:
        odd, other = odd_ranks(numbers[different[0]])
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        raise RanksDisagree(
            f"the parameter `{different[0].split(' ', 1)[1]}` has other values on {odd} than on {other}{more}",
            "load the same state on all ranks that hold it, and let their optimizers have equal settings and states;"
            " Pipeline(compare_copies=0) compares no copies",
        )


class _CopiedStage(NamedTuple):
    """A stage of a place that another rank holds, too. peer: rank of its second copy, or -1. first: it is copy A.

    watched: other buffers that belong to the state, by name.
    """

    place: Coordinate
    peer: int
    first: bool
    layers: tuple[_NormBase, ...]
    watched: tuple[tuple[str, Tensor], ...]


class RunningStatistics:
    """The running statistics of the stages in this process that other ranks hold, too."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._stages = [stage for stage in _copied_stages(assembly) if stage.layers or stage.watched]
        self._before: list[Tensor] = []
        self._versions: list[list[int]] = []

    def begin(self) -> None:
        """A training step begins: keep the values that all copies have."""
        self._before = [_flat(stage.layers) for stage in self._stages]
        self._versions = [[value._version for _, value in stage.watched] for stage in self._stages]

    def combine(self) -> None:
        """The step has ended: give all copies the same values. A collective of the ranks with copies.

        Raises `RuntimeFault` for another buffer of the state that the step has changed.
        """
        if self._stages:
            self._combine()

    @torch.no_grad()
    def _combine(self) -> None:
        for stage, versions in zip(self._stages, self._versions, strict=True):
            for (name, value), version in zip(stage.watched, versions, strict=True):
                if value._version != version:
                    raise RuntimeFault(
                        f"the step has changed the buffer `{name}`, of which another rank holds a copy that has seen"
                        " other microbatches: the copies would drift apart",
                        "take a schedule with one copy of every stage and a mesh without replicas, or keep the buffer"
                        " out of the state (persistent=False)",
                    )
        values = self._over_copies([_flat(stage.layers) for stage in self._stages])
        for stage, value in zip(self._stages, self._over_replicas(values), strict=True):
            _put(stage.layers, value)

    def _over_copies(self, values: list[Tensor]) -> list[Tensor]:
        """[statistics] of each stage, with what its second copy in the same replica has seen."""
        transports = self._assembly.network.transports
        theirs = [torch.empty_like(value) for value in values]
        posted = [
            transports[stage.place].post([Transfer(stage.peer, True, (other,)), Transfer(stage.peer, False, (value,))])
            if stage.peer >= 0 and len(value)
            else []
            for stage, value, other in zip(self._stages, values, theirs, strict=True)
        ]
        for stage, handles in zip(self._stages, posted, strict=True):
            for handle in handles:
                transports[stage.place].wait(handle)
        return [
            serial_statistics(stage.layers, before, *((value, other) if stage.first else (other, value)))
            if stage.peer >= 0 and len(value)
            else value
            for stage, before, value, other in zip(self._stages, self._before, values, theirs, strict=True)
        ]

    def _over_replicas(self, values: list[Tensor]) -> list[Tensor]:
        """[statistics] of each stage, with what the other replicas have seen. Tensor ranks see the same."""
        mesh = self._assembly.mesh
        if mesh.replicas == 1:
            return values
        peers = [self._assembly.network.peer_groups[stage.place] for stage in self._stages]
        groups = [group.same_products for group in peers]
        started = [
            group.all_gather(value, "running statistics") if len(value) else None
            for group, value in zip(groups, values, strict=True)
        ]
        together = []
        for stage, group, handle, before, value in zip(
            self._stages, groups, started, self._before, values, strict=True
        ):
            whole = value
            if handle is not None:
                whole, *others = group.wait(handle).unbind(0)
                for other in others:
                    whole = serial_statistics(stage.layers, before, whole, other)
            together.append(whole)
        return together


def _copied_stages(assembly: Assembly) -> Iterator[_CopiedStage]:
    ranks = assembly.program.placement.rank_of_stage
    for place in assembly.places:
        for index, stage in sorted(assembly.stages[place].items()):
            peer = next((int(rank) for rank in ranks[:, index] if rank != place.pipeline), -1)
            if peer >= 0 or assembly.mesh.peers > 1:
                norms = [m for m in stage.module.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
                first = bool(ranks[0, index] == place.pipeline)
                yield _CopiedStage(place, peer, first, tuple(norms), tuple(_watched(stage.module)))


def _watched(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a module's state that nothing keeps equal on all copies."""
    skipped = {id(part) for each in module.modules() if isinstance(each, MoELayer) for part in each.modules()}
    for name, each in module.named_modules():
        if isinstance(each, _NormBase) or id(each) in skipped:
            continue
        for own, value in each.named_buffers(recurse=False):
            if own not in each._non_persistent_buffers_set:
                yield f"{name}.{own}" if name else own, value


@torch.no_grad()
def _flat(layers: Iterable[_NormBase]) -> Tensor:
    """[statistics] mean, variance and number of updates of each layer, in float64."""
    parts = [part for layer in layers for part in _buffers(layer)]
    return torch.cat([part.reshape(-1).to(torch.float64) for part in parts]) if parts else torch.empty(0)


def _buffers(layer: _NormBase) -> tuple[Tensor, Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return layer.running_mean, layer.running_var, layer.num_batches_tracked


def _put(layers: Iterable[_NormBase], values: Tensor) -> None:
    buffers = [part for layer in layers for part in _buffers(layer)]
    for buffer, value in zip(buffers, torch.split(values, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(value.view_as(buffer))


def serial_statistics(layers: Iterable[_NormBase], before: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """[statistics] after the updates of ``first``, then those of ``second``, that both began with ``before``."""
    parts: list[Tensor] = []
    start = 0
    for layer in layers:
        size = 2 * layer.num_features
        old, one, two = (each[start : start + size + 1] for each in (before, first, second))
        updates = one[size] + two[size] - old[size]
        if layer.momentum is None:  # the mean over all updates
            sums = one[:size] * one[size] + two[:size] * two[size] - old[:size] * old[size]
            parts.append(torch.where(updates > 0, sums / updates.clamp(min=1), old[:size]))
        else:
            decay = (1.0 - layer.momentum) ** (two[size] - old[size])
            parts.append(two[:size] + decay * (one[:size] - old[:size]))
        parts.append(updates.unsqueeze(0))
        start += size + 1
    return torch.cat(parts)
