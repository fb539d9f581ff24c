"""Assembles the `Schedule`: numbers the microbatches of the expanded ops, rank by rank, and fills the columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.elaborate.evaluate import Evaluator
from schedc.elaborate.expand import MAX_FINDINGS, ExpandedItem, unpack
from schedc.elaborate.numbering import RankOps, number_microbatches
from schedc.elaborate.sizes import segments_per_microbatch
from schedc.ir.arrays import Int64
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


def assemble(tree: t.ScheduleTree, evaluator: Evaluator, placement: Placement, order: ExpandedOrder) -> Schedule:
    """The schedule of an expanded order.

    placement: with the microbatches that the order is written for.
    Raises `DiagnosticError` (S118, S119, S208) if an op can take no microbatch.
    """
    columns = _Columns(placement, order, segments_per_microbatch(tree, evaluator.sizes))
    faults = _Faults(evaluator, order.items)
    for rank in range(placement.ranks if order.items else 0):
        columns.fill(rank, faults)
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
        source=tree.source,
    )


class _Columns:
    """The columns of the schedule, filled one rank at a time so that little memory is needed besides them."""

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

    def fill(self, rank: int, faults: _Faults) -> None:
        """Fill the rows of one rank; ops that can take no microbatch are added to ``faults``."""
        rows = slice(int(self.order.rank_start[rank]), int(self.order.rank_start[rank + 1]))
        item, chunk, explicit = unpack(self.order.codes[rows])
        self.kind[rows] = self.kind_of_item[item]
        numbered = number_microbatches(RankOps(self.kind[rows], chunk, explicit, self.segments))
        faults.starved(rank, item, numbered.starved)
        chunk = np.maximum(numbered.chunk, 0)  # a starved W has no chunk, and is reported
        pipe = self.placement.pipe_of_chunk[rank][chunk]
        faults.too_many(rank, item, chunk, numbered.microbatch, np.diff(self.first_microbatch)[pipe])
        self.stage[rows] = self.placement.stage_of_chunk[rank][chunk]
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

    def starved(self, rank: int, item: Int64, rows: Int64) -> None:
        """Add the first W of a rank for which no input gradient is pending. rows: such W, as rows of the rank."""
        for row in rows[:1].tolist():
            message = "a weight gradient with no input gradient pending"
            code, help = "S119", "each W takes the oldest I before it that no W has taken"
            if self.items[int(item[row])].half:
                code, help = "S208", f"{help}: run its I first, and pair the W with an op behind it, as in F  I  F & W"
            self._add(code, rank, int(item[row]), message, help)

    def too_many(self, rank: int, item: Int64, chunk: Int64, microbatch: Int64, count: Int64) -> None:
        """Add the ops of a rank whose number is beyond the microbatches of their chunk. count: [ops of the rank]."""
        beyond = microbatch >= count
        if not beyond.any():
            return
        _, first = np.unique(item[beyond], return_index=True)
        for row in np.flatnonzero(beyond)[first[:MAX_FINDINGS]].tolist():
            name = FACTS[self.items[int(item[row])].kind].name
            message = f"{name} {microbatch[row] + 1} of chunk {chunk[row]}, which has {count[row]} microbatches"
            self._add("S118", rank, int(item[row]), message, "count what the phases before it do at these sizes")

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
