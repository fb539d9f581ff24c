"""Many costs of cells as columns: the times of segments and exchanges by name, K values each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.cell.costs import CellCosts, SliceFactor, entries, repeated_entries, share_of_slice, time_column
from schedc.cell.program import Half
from schedc.cell.tasks import Tasks
from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats, Int64


@dataclass(frozen=True, eq=False)
class CellCostBatch:
    """K `CellCosts` with the same names.

    times: by name as in `CellCosts`, segments and exchanges together, [3, K]: forward, input and weight gradient.
    slices: the factors of slices, the same for all.
    """

    times: Mapping[str, Floats]
    count: int
    slices: tuple[SliceFactor, ...] = ()

    def __len__(self) -> int:
        return self.count

    @classmethod
    def of(cls, costs: Sequence[CellCosts]) -> CellCostBatch:
        """The columns of one or more costs that give times to the same names."""
        tables = [dict((*each.segments, *each.exchanges)) for each in costs]
        if not costs or any(each.keys() != tables[0].keys() for each in tables) or len({c.slices for c in costs}) > 1:
            raise CompilerBug("cells", "a batch of costs with different names or factors of slices")
        times = {name: np.array([table[name] for table in tables]).T for name in tables[0]}
        return cls(times, len(costs), costs[0].slices)

    def durations(self, tasks: Tasks) -> Floats:
        """[tasks, K] times, in the unit of the costs; the same bits as `schedc.cell.tasks.Tasks.durations`."""
        names = frozenset(self.times)
        if names not in tasks.alike:
            tasks.alike[names] = _alike(tasks, names)
        works, number = tasks.alike[names]
        return np.asarray(np.array([self._of(work) for work in works]).reshape(-1, self.count)[number])

    def _of(self, work: _Work) -> Floats:
        """[K] times of a work; see `schedc.cell.costs.CellCosts.duration`."""
        time = self._sum(work, time_column(work.half, work.exchange))
        if work.half is Half.BACKWARD and work.inside:
            time = time + self._sum(work, time_column(Half.FORWARD)) * work.inside
        if work.half is Half.BACKWARD and work.again:
            time = time + self._sum(work._replace(entries=work.again), time_column(Half.FORWARD))
        return time * work.share if work.half is Half.RECOMPUTE else time

    def _sum(self, work: _Work, column: int) -> Floats:
        """[K] times of a node, of a place in `SegmentTimes`."""
        time = sum((self.times[name][column] for name in work.entries), np.zeros(self.count))
        return time if work.slices == 1 else time * share_of_slice(self.slices, work.slices, work.exchange)


class _Work(NamedTuple):
    """What decides of a task how long it takes: tasks of many layers are alike."""

    half: Half
    entries: tuple[str, ...]
    share: float
    inside: float
    again: tuple[str, ...]
    slices: int
    exchange: bool


def _alike(tasks: Tasks, names: frozenset[str]) -> tuple[tuple[_Work, ...], Int64]:
    """The works of tasks where costs have these names, each once, and [tasks] the number of each."""
    numbers: dict[_Work, int] = {}
    number = []
    for task in tasks.all:
        shape = tasks.shape(task.half)
        node = shape.nodes[task.node]
        known = entries(shape, task.node, names)
        again = repeated_entries(node, names)
        work = _Work(task.half, known, node.share, node.inside, again, node.slices, node.exchange)
        number.append(numbers.setdefault(work, len(numbers)))
    return tuple(numbers), np.array(number, np.int64)
