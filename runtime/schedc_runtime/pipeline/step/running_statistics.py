"""Running statistics of stages that several ranks hold: brought together, as if one rank had run all microbatches.

A batch norm updates its running mean by `new = (1 - momentum) * old + momentum * batch`. Copies that begin equal and
see different microbatches end in different values. After h updates a copy holds `(1 - momentum)**h * old + change`. One
rank that runs the microbatches of copy A, then those of copy B, therefore ends with
`B + (1 - momentum)**h_B * (A - old)`. All ranks compute this in one order, and so keep equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.transport import Transfer


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

    @torch.no_grad()
    def begin(self) -> None:
        """A training step begins: keep the values that all copies have."""
        self._before = [_flat(stage.layers) for stage in self._stages]
        self._versions = [[value._version for _, value in stage.watched] for stage in self._stages]

    @torch.no_grad()
    def combine(self) -> None:
        """The step has ended: give all copies the same values. A collective of the ranks that hold them.

        Raises `RuntimeFault` for another buffer of the state that the step has changed.
        """
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
        """[statistics] of each stage, with what the other replicas have seen."""
        if self._assembly.mesh.replicas == 1:
            return values
        groups = [self._assembly.network.peer_groups[stage.place].replicas for stage in self._stages]
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
            if peer >= 0 or assembly.mesh.replicas > 1:
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
