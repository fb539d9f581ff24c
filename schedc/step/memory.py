"""What every rank holds after and inside every cell: activations, pending weight gradients, and their peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Floats, Int64, repeat
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies, reduce_by_rank

if TYPE_CHECKING:
    from schedc.step.placed_works import PlacedWorks, TimedWorks


class RankBytes(NamedTuple):
    """The most bytes of ranks, parameters included.

    peak: [P] by what microbatches hold before and behind ops. inside: [P] the same with what runs inside cells; None
    where the sizes of layers are not known.
    """

    peak: Floats
    inside: Floats | None


@dataclass(frozen=True, eq=False)
class Memory:
    """Curves over the cells and peaks of the ranks.

    An activation is the memory of a microbatch on a stage (a chunk), from F until B, or until W where the backward is
    split. Between its I and its W it is also a pending weight gradient. One that has an R counts from that R on; from
    its F until then it holds the ``recomputed`` part of the costs. ``inside`` is the largest value while a cell runs:
    in a pair the forward allocates before the backward frees.

    activations, activations_inside: [cells] activations held after the cell and at most inside it, in chunks.
    pending_weight: [cells] activations that only wait for their W, after the cell.
    memory, memory_inside: [cells] the same weighted by the costs: ``activation`` of its stage from F to B or I,
        ``pending_weight`` from I to W, in the unit of the costs.
    peak_activations: [P] inside cells; peak_activations_between: [P] after cells; peak_pending_weight: [P].
    peak_memory: [P] inside cells and between them, in the unit of the costs; that of ``held`` where it is there.
    between: [P] the most between cells, where works hold memory there; else None.
    held: bytes of ranks whose plan has a memory in bytes, with parameters and what else it counts; else None.
    """

    dependencies: Dependencies
    activations: Int64
    activations_inside: Int64
    pending_weight: Int64
    memory: Floats
    memory_inside: Floats
    between: Floats | None = None
    held: RankBytes | None = None

    @property
    def peak_activations(self) -> Int64:
        return self._peaks(self.activations_inside)

    @property
    def peak_activations_between(self) -> Int64:
        return self._peaks(self.activations)

    @property
    def peak_pending_weight(self) -> Int64:
        return self._peaks(self.pending_weight)

    @property
    def peak_memory(self) -> Floats:
        if self.held is not None:
            return self.held.peak
        inside: Floats = self._peaks(self.memory_inside)
        return inside if self.between is None else np.maximum(inside, self.between)

    def _peaks(self, curve: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return reduce_by_rank(np.maximum, curve, self.dependencies.rank_start)


HELD = np.array(
    [[1 if kind == taker else -FACTS[kind].weight for kind in OpKind] for taker in (OpKind.F, OpKind.R)],
    np.int64,
)
"""[2, kinds] activations that an op adds: each W frees what its F took, and a B does so at once. Row 1 is of
microbatches that have an R: they count from it on."""
_PENDING = np.array([{OpKind.I: 1, OpKind.W: -1}.get(kind, 0) for kind in OpKind], np.int64)


def measure_memory(schedule: Schedule, costs: Costs | None = None, dependencies: Dependencies | None = None) -> Memory:
    """Memory of a verified schedule. It depends on the order only, not on the times.

    Raises `DiagnosticError` (S404) for costs of another number of stages.
    """
    known = dependencies or Dependencies.of(schedule)
    of_stage = (costs or Costs()).resolved(schedule.stages)
    again = recomputed_ops(schedule).astype(np.int8)
    weights = memory_changes(of_stage.activation, of_stage.pending_weight, of_stage.recomputed, of_stage.restored)
    held, held_inside = curve(known, HELD[again, schedule.kind])
    waiting, _ = curve(known, _PENDING[schedule.kind])
    memory, memory_inside = curve(known, weights[again, schedule.kind, schedule.stage])
    return Memory(known, held, held_inside, waiting, memory, memory_inside)


def memory_of(dependencies: Dependencies, costs: Costs, works: TimedWorks | None, held: RankBytes | None) -> Memory:
    """The memory of the device in a step: without what works have moved. held: bytes of ranks, where they are known."""
    memory = measure_memory(dependencies.schedule, costs, dependencies)
    return replace(memory if works is None else without(memory, works.placed), held=held)


def without(memory: Memory, placed: PlacedWorks) -> Memory:
    """The memory of a schedule of whose activations works move some to the host: what is left on the device."""
    cells = memory.dependencies
    away = placed.away(cells)
    count = placed.of_activations.counted().away(cells).round().astype(np.int64)
    return replace(
        memory,
        activations=memory.activations - count,
        activations_inside=memory.activations_inside - count,
        memory=memory.memory - away,
        memory_inside=memory.memory_inside - away,
        between=None if placed.moves_activations_alone else placed.peaks_between(cells, memory.memory),
    )


def memory_changes(activation: Floats, pending: Floats, recomputed: Floats, restored: Floats) -> Floats:
    """[2, kinds, stages] memory that an op adds; row 1: of microbatches that have an R.

    An I replaces the activation by what the weight gradient still needs. Kinds that are not listed change nothing.
    activation, pending, recomputed, restored: [stages] memory, as in `StageCosts`.
    """

    def added(forward: Floats, again: Floats) -> list[Floats]:
        held = forward + again
        kinds = {OpKind.F: forward, OpKind.R: again, OpKind.I: pending - held, OpKind.W: -pending, OpKind.B: -held}
        return [kinds.get(kind, np.zeros_like(forward)) for kind in OpKind]

    return np.stack([added(activation, np.zeros_like(activation)), added(recomputed, restored - recomputed)])


def curve(dependencies: Dependencies, change: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """[cells] value after each cell and the largest inside it, of a count that starts at 0 on every rank.

    change: [ops] what each op adds. The forward of a pair comes first and adds before its backward frees.
    """
    schedule = dependencies.schedule
    total = np.concatenate([[0], np.cumsum(change)])
    value = total[1:] - repeat(total[schedule.rank_start[:-1]], np.diff(schedule.rank_start))
    first, second = dependencies.first, dependencies.second
    after = value[np.maximum(first, second)]
    before = value[first] - change[first]
    return after, np.maximum(np.maximum(before, value[first]), after)
