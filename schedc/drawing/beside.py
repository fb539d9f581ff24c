"""What runs beside the compute of a drawing: works and copies of experts, as one table of rows on lanes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schedc.cell.graph import LINKS
from schedc.drawing.markup import quantity
from schedc.ir.arrays import Floats, Int64
from schedc.ir.works import GROUP_NAMES, KIND_NAMES, LANE_NAMES, WorkGroup
from schedc.step.copy_runs import COPY_NAMES, CopyRuns
from schedc.step.work_runs import WorkRuns
from schedc.units import plain, shown

LANES = (*LANE_NAMES, *(str(lane) for lane in LINKS))
"""Lanes by their number here: those of works, and the links on which copies travel."""
KINDS = (*KIND_NAMES, *COPY_NAMES)
"""What rows do, by number here."""
JOINED = len(KIND_NAMES)
"""Kinds below this number have a JOIN between cells. Copies are joined inside cells."""
_SHORT = (*(name[:2] for name in KIND_NAMES), "w", "g")
"""What stands before the stage in a row without microbatch, by kind."""


@dataclass(frozen=True, eq=False)
class Beside:
    """Rows on lanes in order of rank, lane and time.

    kind, lane: [rows] numbers in `KINDS` and `LANES`. rank, stage: [rows]. microbatch: -1 for what concerns the whole
    step. layer: of a copy in its stage, else -1. group: `WorkGroup` of a work, -1 for a copy. size: [rows] number in
    ``sizes``, which are texts, "" where it is not known. begin, finish: time units. exposed: time units for which the
    rank stands.
    """

    sizes: tuple[str, ...]
    kind: Int64
    lane: Int64
    rank: Int64
    stage: Int64
    microbatch: Int64
    layer: Int64
    group: Int64
    size: Int64
    begin: Floats
    finish: Floats
    exposed: Floats

    @classmethod
    def of(cls, works: WorkRuns | None, copies: CopyRuns | None) -> Beside | None:
        """The rows of both; None for a step without either."""
        if works is None and copies is None:
            return None
        tables = [*([] if works is None else [_of_works(works)]), *([] if copies is None else [_of_copies(copies)])]
        columns: list[Any] = [np.concatenate(column) for column in zip(*tables, strict=True)]
        order = np.lexsort((columns[-3], columns[1], columns[2]))
        write = shown if works is not None and works.in_bytes else plain
        sizes = [] if works is None else [write(float(size)) for size in np.unique(works.works.bytes)]
        return cls(("", *sizes), *(column[order] for column in columns))

    def __len__(self) -> int:
        return int(self.kind.size)

    def lanes_of(self, rank: int) -> list[int]:
        """The lanes that a rank uses."""
        lanes: list[int] = np.unique(self.lane[self.rank == rank]).tolist()
        return lanes

    def on(self, rank: int, lane: int) -> Int64:
        """[rows of the lane] the rows of a lane of a rank, in order of time."""
        return np.flatnonzero((self.rank == rank) & (self.lane == lane))

    def waits(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """(row, begin, end) of each time that a rank stands at a JOIN between cells."""
        for row in np.flatnonzero((self.exposed > 0) & (self.rank == rank) & (self.kind < JOINED)).tolist():
            yield row, float(self.finish[row] - self.exposed[row]), float(self.finish[row])

    @cached_property
    def stands(self) -> bool:
        """Whether a rank stands at a JOIN between cells."""
        return bool(((self.exposed > 0) & (self.kind < JOINED)).any())

    def name(self, row: int) -> str:
        """What a row does: ``offload of stage 0, microbatch 3``."""
        layer, microbatch, group = (int(column[row]) for column in (self.layer, self.microbatch, self.group))
        parts = [
            f"{KINDS[self.kind[row]]} of stage {self.stage[row]}",
            *([f"layer {layer}"] if layer >= 0 else []),
            *([f"microbatch {microbatch}"] if microbatch >= 0 else []),
            *([f"among {GROUP_NAMES[group - WorkGroup.LOCAL]}"] if group >= 0 else []),
        ]
        return ", ".join(parts)

    def hover(self, row: int) -> list[str]:
        """What there is to say of a row, line by line."""
        begin, finish, exposed = (float(column[row]) for column in (self.begin, self.finish, self.exposed))
        place = "at the JOIN" if self.kind[row] < JOINED else "inside a cell"
        stands = f"its rank stands {quantity(exposed)} {place}" if exposed > 0 else "nothing exposed"
        size = self.sizes[self.size[row]]
        moves = f"lane {LANES[self.lane[row]]}" + (f", moves {size}" if size else "")
        return [self.name(row), moves, f"{quantity(begin)} to {quantity(finish)}", stands]

    def numeral(self, row: int) -> str:
        """The text in a row: its microbatch. Without one it is letters of the kind, and the stage."""
        microbatch = int(self.microbatch[row])
        return str(microbatch) if microbatch >= 0 else f"{_SHORT[self.kind[row]]}{self.stage[row]}"

    def legend(self) -> list[tuple[int, str]]:
        """Each lane in use, with what its rows do: ``offload (d2h)``."""
        pairs = np.unique(np.stack([self.lane, self.kind], 1), axis=0).tolist()
        lanes = dict.fromkeys(lane for lane, _ in pairs)
        return [
            (lane, f"{', '.join(KINDS[kind] for other, kind in pairs if other == lane)} ({LANES[lane]})")
            for lane in lanes
        ]


def _of_works(works: WorkRuns) -> tuple[Int64 | Floats, ...]:
    columns = works.works
    times = works.times
    numbers = (columns.kind, columns.lane, works.rank, columns.stage, columns.microbatch, np.full(len(works), -1),
               columns.group, 1 + np.unique(columns.bytes, return_inverse=True)[1])  # fmt: skip
    return *(column.astype(np.int64) for column in numbers), times.begin, times.finish, times.exposed


def _of_copies(copies: CopyRuns) -> tuple[Int64 | Floats, ...]:
    kind = JOINED + copies.gradients.astype(np.int64)
    return (
        kind, len(LANE_NAMES) + copies.lane, copies.rank, copies.stage, copies.microbatch, copies.layer,
        np.full(kind.size, int(WorkGroup.LOCAL)), 0 * kind,
        copies.begin, copies.finish, copies.exposed,
    )  # fmt: skip
