"""Assembles the `Schedule`: numbers the microbatches of the expanded ops, and fills the columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.elaborate.evaluate import Evaluator
from schedc.elaborate.expand import MAX_FINDINGS, ExpandedItem, unpack
from schedc.elaborate.numbering import RankOps, number_microbatches
from schedc.elaborate.sizes import segments_per_microbatch
from schedc.ir.arrays import Int64, repeat
from schedc.ir.ops import FACTS
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.syntax import tree as t


@dataclass(frozen=True)
class ExpandedOrder:
    """The ops of all ranks as the text lists them.

    items: the ops of the text. codes: [ops] packed item, chunk and named microbatch of each op.
    rank_start: [ranks + 1] where the ops of each rank begin in ``codes``.
    """

    items: list[ExpandedItem]
    codes: Int64
    rank_start: Int64


def assemble_schedule(
    tree: t.ScheduleTree, evaluator: Evaluator, placement: Placement, order: ExpandedOrder
) -> Schedule:
    """The schedule of an expanded order.

    placement: with the microbatches that the order is written for.
    Raises `DiagnosticError` (S118, S119, S208) if an op can take no microbatch.
    """
    columns = _Columns(placement, order, segments_per_microbatch(tree, evaluator.sizes))
    faults = _Faults(evaluator, order.items)
    for first, stop in _together(order.rank_start) if order.items else ():
        columns.fill(first, stop, faults)
    faults.report()
    return Schedule(
        name=tree.name,
        sizes=dict(evaluator.sizes),
        placement=placement,
        rank_start=order.rank_start,
        kind=columns.kind,
        stage=columns.stage,
        microbatch=columns.microbatch,
        pair=columns.pair,
        phase=columns.phase,
        span=columns.span,
        phases=columns.phases,
        spans=tuple(item.span for item in order.items) or (tree.span,),
        doc=tree.doc,
        segments=columns.segments,
        source=tree.source,
    )


_MOST_TOGETHER = 1 << 17
"""Ops that are numbered together, unless one rank has more: this bounds the memory besides that of the columns."""


def _together(rank_start: Int64) -> Iterator[tuple[int, int]]:
    """First rank and the one behind the last of each group of ranks that are filled together."""
    first, ranks = 0, rank_start.size - 1
    while first < ranks:
        end = np.searchsorted(rank_start, rank_start[first] + _MOST_TOGETHER, side="right") - 1
        stop = min(max(int(end), first + 1), ranks)
        yield first, stop
        first = stop


class _Columns:
    """The columns of the schedule, filled for some ranks at a time."""

    def __init__(self, placement: Placement, order: ExpandedOrder, segments: int) -> None:
        self.placement, self.order, self.segments = placement, order, segments
        self.phases = tuple(dict.fromkeys(item.phase for item in order.items)) or ("",)
        self.kind_of_item = np.array([item.kind for item in order.items], np.int8)
        self.half_of_item = np.array([item.half for item in order.items], np.int8)
        self.phase_of_item = np.array([self.phases.index(item.phase) for item in order.items], np.int32)
        self.first_microbatch = np.asarray(placement.first_microbatch, np.int64)
        ops = order.codes.size
        self.kind = np.empty(ops, np.int8)
        self.stage, self.microbatch, self.pair, self.phase, self.span = (np.empty(ops, np.int32) for _ in range(5))
        self.pairs = 0

    def fill(self, first: int, stop: int, faults: _Faults) -> None:
        """Fill the rows of ranks first ..< stop; ops that can take no microbatch are added to ``faults``."""
        starts = self.order.rank_start[first : stop + 1]
        rows = slice(int(starts[0]), int(starts[-1]))
        item, chunk, explicit = unpack(self.order.codes[rows])
        rank = repeat(np.arange(first, stop), np.diff(starts))
        self.kind[rows] = self.kind_of_item[item]
        numbered = number_microbatches(RankOps(self.kind[rows], rank, chunk, explicit, self.segments))
        faults.starved(rank, item, numbered.starved)
        chunk = np.maximum(numbered.chunk, 0)  # a starved W has no chunk, and is reported
        pipe = self.placement.pipe_of_chunk[rank, chunk]
        faults.too_many(rank, item, chunk, numbered.microbatch, np.diff(self.first_microbatch)[pipe])
        self.stage[rows] = self.placement.stage_of_chunk[rank, chunk]
        self.microbatch[rows] = numbered.microbatch + self.first_microbatch[pipe]
        half = self.half_of_item[item]
        self.pair[rows] = np.where(half > 0, self.pairs - 1 + np.cumsum(half == 1), -1)
        self.pairs += int(np.count_nonzero(half == 1))
        self.phase[rows] = self.phase_of_item[item]
        self.span[rows] = item


@dataclass
class _Faults:
    """Ops that can take no microbatch: for each op of the text, the first such case over the ranks."""

    evaluator: Evaluator
    items: list[ExpandedItem]

    def __post_init__(self) -> None:
        self.findings: dict[tuple[str, int], Diagnostic] = {}

    def starved(self, rank: Int64, item: Int64, rows: Int64) -> None:
        """Add the first W of each rank for which no input gradient is pending.

        rank, item: [ops]. rows: such W among the ops, ascending.
        """
        for row in rows[np.unique(rank[rows], return_index=True)[1]].tolist():
            message = "a weight gradient with no input gradient pending"
            code, help = "S119", "each W takes the oldest I before it that no W has taken"
            if self.items[int(item[row])].half:
                code, help = "S208", f"{help}: run its I first, and pair the W with an op behind it, as in F  I  F & W"
            self._add(code, int(rank[row]), int(item[row]), message, help)

    def too_many(self, rank: Int64, item: Int64, chunk: Int64, microbatch: Int64, count: Int64) -> None:
        """Add the ops whose number is beyond the microbatches of their chunk, each at the first rank where it is.

        rank, item, chunk, microbatch: [ops]. count: [ops] microbatches of the chunk.
        """
        beyond = microbatch >= count
        if not beyond.any():
            return
        _, first = np.unique(item[beyond], return_index=True)
        for row in np.flatnonzero(beyond)[first].tolist():
            name = FACTS[self.items[int(item[row])].kind].name
            message = f"{name} {microbatch[row] + 1} of chunk {chunk[row]}, which has {count[row]} microbatches"
            self._add("S118", int(rank[row]), int(item[row]), message, "count the ops of earlier phases at these sizes")

    def _add(self, code: str, rank: int, item: int, message: str, help: str) -> None:
        if (code, item) not in self.findings:
            message = f"{message} for {self.evaluator.where(rank)}"
            label = Label(self.items[item].span)
            self.findings[code, item] = Diagnostic(code, message, label, help=help, source=self.evaluator.source)

    def report(self) -> None:
        """Raise `DiagnosticError` if there are findings."""
        if self.findings:
            by_place = sorted(self.findings.values(), key=lambda finding: finding.primary.span)
            raise DiagnosticError(by_place[:MAX_FINDINGS])
