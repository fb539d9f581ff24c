"""The first IR: what each rank computes, in order. No communication, no costs, no hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int8, Int32, Int64
from schedc.ir.columns import Columns
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.placement import Placement
from schedc.ir.plan import NO_PLAN, Plan
from schedc.ir.ties import Tie
from schedc.source import NOWHERE, Source, Span


class Op(NamedTuple):
    """A row of a `Schedule`, for people and tests; loops over many ops use the columns."""

    rank: int
    kind: OpKind
    stage: int
    microbatch: int
    pair: int
    phase: str
    span: Span

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"


OP_COLUMNS = ("kind", "stage", "microbatch", "pair", "phase", "span")
"""The columns of a `Schedule`, a value per op."""


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(Columns):
    """Placement, sizes, and the ordered ops of every rank, as columns.

    The ops of rank r are rows rank_start[r] ..< rank_start[r + 1], in the order they run.

    name: the schedule's name. doc: the text of its ``##`` comments.
    sizes: every size parameter by name, e.g. {"P": 4, "M": 10}.
    rank_start: [P + 1]
    kind: [n] `OpKind`; stage: [n]; microbatch: [n], over all pipes (pipe 1 of two starts at M / 2).
    pair: [n] -1, or a number shared by exactly two neighbouring rows: one overlapped cell. It is a forward and then
        a B, I or W, or an I and then a W (`schedc.ir.ops.PAIR_NAMES`).
    phase: [n] index into ``phases``; span: [n] index into ``spans``.
    layout, layers: where a plan puts the parts of a model, as a layout string, and its number of decoder layers; empty
        and 0 where nothing is said. The order does not depend on it.
    plan: what the plan attaches besides.
    tied: the stages that use the same parameters; empty where nothing is said.
    segments: parts of each sequence; microbatch m * segments + j of the order is segment j of microbatch m.
    source: the text that ``spans`` point into, if there is one.
    """

    name: str
    sizes: Mapping[str, int]
    placement: Placement
    rank_start: Int64
    kind: Int8
    stage: Int32
    microbatch: Int32
    pair: Int32
    phase: Int32
    span: Int32
    phases: tuple[str, ...] = ("",)
    spans: tuple[Span, ...] = (NOWHERE,)
    doc: str = ""
    layout: str = ""
    layers: int = 0
    plan: Plan = NO_PLAN
    tied: tuple[Tie, ...] = ()
    segments: int = 1
    source: Source | None = field(default=None, compare=False, repr=False)

    def op(self, row: int) -> Op:
        return Op(
            int(self.rank[row]),
            OpKind(int(self.kind[row])),
            int(self.stage[row]),
            int(self.microbatch[row]),
            int(self.pair[row]),
            self.phases[self.phase[row]],
            self.spans[self.span[row]],
        )

    def ops(self, rank: int) -> Iterator[Op]:
        """The ops of one rank, in order."""
        return (self.op(row) for row in range(int(self.rank_start[rank]), int(self.rank_start[rank + 1])))

    def only(self, rows: Int64) -> Schedule:
        """The schedule of these rows alone, ascending: of a pair both or, with ``pair`` to be set to -1, one."""
        columns = {name: getattr(self, name)[rows] for name in OP_COLUMNS}
        return replace(self, rank_start=np.searchsorted(rows, self.rank_start), **columns)

    def describe(self, row: int) -> str:
        """How messages name an op: ``3F0 (rank 3)``."""
        return f"{self.stage[row]}{LETTERS[self.kind[row]]}{self.microbatch[row]} (rank {self.rank[row]})"
