"""When copies of experts travel in a step that is priced from inside its cells, for drawings and traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int64
from schedc.step.timeline import Timeline

COPY_NAMES = ("weights of copies", "gradients of copies")
"""Names of what owners send ahead, and of what returns."""
COPIES = "copies"
"""The category of their slices in traces. Readers leave these out: a slice of a cell has their time, too."""


def copy_name(gradients: bool, stage: int, layer: int, microbatch: int = -1) -> str:
    """What an exchange of copies moves: ``weights of copies of stage 0, layer 1, microbatch 3``.

    layer: number in the stage. microbatch: -1 where copies last for the step.
    """
    what = f"{COPY_NAMES[gradients]} of stage {stage}, layer {layer}"
    return what if microbatch < 0 else f"{what}, microbatch {microbatch}"


class CopyColumns(NamedTuple):
    """Columns of `CopyRuns` for exchanges of one kind.

    layer, lane, gradients: of all of them. stage, microbatch: [exchanges] of the copies. cell: [exchanges].
    begin, finish, exposed: [exchanges] time units.
    """

    layer: int
    lane: int
    gradients: bool
    stage: Int64
    microbatch: Int64
    cell: Int64
    begin: Floats
    finish: Floats
    exposed: Floats


@dataclass(frozen=True, eq=False)
class CopyRuns:
    """The exchanges of copies on one rank of the expert group, in order of pipeline rank and time.

    rank: [exchanges] pipeline rank. stage, layer: whose copies; layer: number in the stage. microbatch: -1 where copies
    last for the step. lane: index in `schedc.cell.graph.LINKS`. gradients: whether they come back from copies.
    begin, finish: time units. exposed: time units for which the rank stands while they travel.
    timeline: the cells of the same step.
    """

    rank: Int64
    stage: Int64
    layer: Int64
    microbatch: Int64
    lane: Int64
    gradients: Bools
    begin: Floats
    finish: Floats
    exposed: Floats
    timeline: Timeline

    @classmethod
    def of(cls, kinds: Iterable[CopyColumns], timeline: Timeline) -> CopyRuns | None:
        """The exchanges that take time; None where none does."""
        tables = [_rows(kind) for kind in kinds if kind.cell.size]
        if not tables:
            return None
        cell, *columns, begin, finish, exposed = (np.concatenate(column) for column in zip(*tables, strict=True))
        rank = timeline.dependencies.rank[cell].astype(np.int64)
        travels = np.flatnonzero(finish > begin)
        order = travels[np.lexsort((begin[travels], rank[travels]))]
        if not order.size:
            return None
        layer, lane, gradients, stage, microbatch = (column[order] for column in columns)
        times = begin[order], finish[order], exposed[order]
        return cls(rank[order], stage, layer, microbatch, lane, gradients > 0, *times, timeline)

    def __len__(self) -> int:
        return int(self.rank.size)

    def name(self, row: int) -> str:
        """What an exchange moves, in words."""
        numbers = (int(column[row]) for column in (self.stage, self.layer, self.microbatch))
        return copy_name(bool(self.gradients[row]), *numbers)


def _rows(kind: CopyColumns) -> tuple[Int64 | Floats, ...]:
    alike = (np.full(kind.cell.size, int(number)) for number in (kind.layer, kind.lane, kind.gradients))
    return kind.cell, *alike, kind.stage, kind.microbatch, kind.begin, kind.finish, kind.exposed
