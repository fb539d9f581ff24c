"""Many costs of cells as columns: the times of segments and exchanges by name, K values each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schedc.cell.costs import CellCosts, SliceFactor, entries, share_of_slice, time_column
from schedc.cell.graph import StageShape
from schedc.cell.program import Half
from schedc.cell.tasks import Tasks
from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats


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
        tables = {half: self._of_half(tasks.shape(half), half) for half in {task.half for task in tasks.all}}
        rows = [tables[task.half][task.node] for task in tasks.all]
        return np.array(rows).reshape(len(rows), self.count)

    def _of_half(self, shape: StageShape, half: Half) -> list[Floats]:
        """[nodes] of [K] times of one half of each node; see `schedc.cell.costs.CellCosts.duration`."""
        column, again = time_column(half), half is Half.RECOMPUTE
        times = []
        for index, node in enumerate(shape.nodes):
            time = self._of_node(shape, index, column)
            if half is Half.BACKWARD and node.inside:
                time = time + self._of_node(shape, index, time_column(Half.FORWARD)) * node.inside
            times.append(time * node.share if again else time)
        return times

    def _of_node(self, shape: StageShape, index: int, column: int) -> Floats:
        """[K] times of a node, of a place in `SegmentTimes`."""
        node = shape.nodes[index]
        time = sum((self.times[name][column] for name in entries(shape, index, self.times)), self._nothing)
        return time if node.slices == 1 else time * share_of_slice(self.slices, node.slices, node.exchange)

    @property
    def _nothing(self) -> Floats:
        return np.zeros(self.count)
