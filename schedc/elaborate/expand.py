"""The body of a rank block to the rows of all ranks at once: loops multiply lanes, never run.

A *lane* is a rank, or one iteration of the loops around a statement on a rank. A statement gives every lane some
rows; a row is one number that packs the op in the text, its chunk and its explicit microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedc.diagnostics import CompilerBug, Diagnostic, DiagnosticError
from schedc.elaborate.evaluate import RANK, Evaluator, Scope, Value
from schedc.ir.arrays import repeat
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.ir.schedule import Int64
from schedc.source import Span
from schedc.syntax import tree as t

MAX_OPS = 20_000_000
"""Ops of a schedule, over all ranks; also the iterations of one loop."""

MAX_FINDINGS = 10

_CHUNK_SHIFT, _MICROBATCH_SHIFT = 20, 36
_ITEM_MASK = (1 << _CHUNK_SHIFT) - 1
_CHUNK_MASK = (1 << (_MICROBATCH_SHIFT - _CHUNK_SHIFT)) - 1


@dataclass(frozen=True)
class ExpandedItem:
    """One op of the text. ``half``: 1 the first op of a pair, 2 the second, 0 a single op.

    computed: whether it stands in a computed order, so that its place in the text is not where it runs.
    """

    kind: OpKind
    phase: str
    span: Span
    half: int
    computed: bool = False


@dataclass(frozen=True)
class InstanceOps:
    """Rows of some lanes, lane by lane; ``counts`` is the number of rows of each lane, or of every lane."""

    codes: Int64
    counts: Value

    def per_lane(self, lanes: int) -> Int64:
        spread: Int64 = np.broadcast_to(np.asarray(self.counts, np.int64), (lanes,))
        return spread


def pack_like(codes: Int64, item: int) -> Int64:
    """Rows of another item, each with the chunk and the microbatch of one of ``codes``."""
    return (codes & ~_ITEM_MASK) | item


def unpack(codes: Int64) -> tuple[Int64, Int64, Int64]:
    """Item, chunk and microbatch of each row; -1 for a chunk or a microbatch that was not written."""
    return codes & _ITEM_MASK, ((codes >> _CHUNK_SHIFT) & _CHUNK_MASK) - 1, (codes >> _MICROBATCH_SHIFT) - 1


@dataclass
class Expander:
    """Expands statements. ``items`` grows with the ops of the text; ``rows`` counts the ops made so far."""

    evaluator: Evaluator
    placement: Placement
    items: list[ExpandedItem] = field(default_factory=list)
    rows: int = 0
    findings: list[Diagnostic] = field(default_factory=list)
    """Faults found so far; what follows a fault is still looked at."""
    computed: bool = False
    """Whether the statement being expanded is in a computed order."""

    def __post_init__(self) -> None:
        held = (self.placement.stage_of_chunk >= 0).sum(axis=1).astype(np.int64)
        self.held: Value = int(held[0]) if (held == held[0]).all() else held
        """Chunks of every rank, or of each."""

    def body(self, statements: Sequence[t.Statement], scope: Scope, phase: str) -> InstanceOps:
        """The rows of a sequence of statements; each lane runs them in order."""
        parts: list[InstanceOps] = []
        for statement in statements if scope.lanes else ():
            try:
                parts += self._statement(statement, scope, phase)
            except DiagnosticError as error:
                self.findings += error.diagnostics
                fatal = isinstance(statement, t.Let) or any(d.code == "S120" for d in error.diagnostics)
                if fatal or len(self.findings) >= MAX_FINDINGS:  # else look for more faults in what follows
                    raise DiagnosticError(self._unique()) from None
        return in_sequence(parts, scope.lanes)

    def _unique(self) -> list[Diagnostic]:
        """Every finding once: a fault inside of loops is found again by each that holds it."""
        found, self.findings = list(dict.fromkeys(self.findings)), []
        return found

    def _statement(self, statement: t.Statement, scope: Scope, phase: str) -> list[InstanceOps]:
        value = self.evaluator.value
        self.evaluator.spend(scope.lanes, statement.span)
        match statement:
            case t.Let(name=name, value=expr):
                scope.names[name] = value(expr, scope)
                return []
            case t.OpItem():
                return [self._op(statement, scope, phase, 0)]
            case t.PairItem(first=first, second=second):
                forward, backward = (first, second) if first.kind == "F" else (second, first)
                return [self._op(forward, scope, phase, 1), self._op(backward, scope, phase, 2)]
            case t.Phase(name=name, body=body):
                return [self.body(body, scope.inside(), name)]
            case t.Repeat(count=count, body=body):
                return [self._loop(statement, value(count, scope), None, body, scope, phase)]
            case t.For(start=start, stop=stop, body=body):
                first_value = value(start, scope)
                return [self._loop(statement, value(stop, scope) - first_value, first_value, body, scope, phase)]
            case t.If():
                return [self._if(statement, scope, phase)]
            case _:
                raise CompilerBug("expand", f"{type(statement).__name__} outside of a rank block's computed order")

    def _op(self, op: t.OpItem, scope: Scope, phase: str, half: int) -> InstanceOps:
        self.rows += scope.lanes
        if self.rows > MAX_OPS:
            message = f"the schedule has more than {MAX_OPS:,} ops"
            self.evaluator.fail("S120", message, op.span, help="use smaller sizes")
        code: Value = len(self.items)
        self.items.append(ExpandedItem(OpKind[op.kind], phase, op.span, half, self.computed))
        code = code + ((self._chunk(op, scope) + 1) << _CHUNK_SHIFT)
        if op.microbatch is not None:
            code = code + ((self._microbatch(op, op.microbatch, scope) + 1) << _MICROBATCH_SHIFT)
        return InstanceOps(np.full(scope.lanes, code, np.int64) if isinstance(code, int) else code, 1)

    def _chunk(self, op: t.OpItem, scope: Scope) -> Value:
        """The chunk of an op; -1 only for a W that takes the oldest of any chunk."""
        held = self.held if isinstance(self.held, int) else self.held[scope.lookup(RANK)]
        if op.chunk is None:
            if op.kind == "W" and op.microbatch is None:
                return -1
            message = "a rank with several chunks, and none is named"
            help = f"say which: {op.kind}0, {op.kind}1 or {op.kind}[expression]"
            self.evaluator.require_all(held == 1, "S110", message, op.span, scope, help)
            return 0
        chunk = self.evaluator.value(op.chunk, scope)
        self.evaluator.require_all(
            _within(chunk, held),
            "S117",
            lambda at: f"chunk {at(chunk)} of a rank with {at(held)} (numbered from 0)",
            op.chunk.span,
            scope,
            "a digit or [expression] after an op is its chunk; `@` names a microbatch",
        )
        return chunk

    def _microbatch(self, op: t.OpItem, expr: t.Expr, scope: Scope) -> Value:
        """The microbatch that ``@`` names, of those of the chunk's pipe."""
        microbatch = self.evaluator.value(expr, scope)
        count = self.placement.microbatches
        message = lambda at: f"microbatch {at(microbatch)} of {count} (numbered from 0)"  # noqa: E731
        self.evaluator.require_all(_within(microbatch, count), "S118", message, expr.span, scope)
        return microbatch

    def _loop(
        self,
        loop: t.Repeat | t.For,
        times: Value,
        first: Value | None,
        body: Sequence[t.Statement],
        scope: Scope,
        phase: str,
    ) -> InstanceOps:
        """``times`` copies of each lane, one per iteration, that run ``body``; with ``first``, of a counting loop."""
        total = self._iterations(loop, times, scope)
        names: dict[str, Value] = {}
        if isinstance(loop, t.For) and first is not None:
            names[loop.name] = _counted(first, times, total, scope.lanes)
        rows = self.body(body, scope.repeated(times, total, names), phase)
        if isinstance(rows.counts, int):
            return InstanceOps(rows.codes, times * rows.counts)
        ends = np.concatenate([[0], np.cumsum(rows.counts)])
        lanes = np.concatenate([[0], np.cumsum(np.broadcast_to(times, (scope.lanes,)))])
        return InstanceOps(rows.codes, np.diff(ends[lanes]))

    def _iterations(self, loop: t.Repeat | t.For, times: Value, scope: Scope) -> int:
        """How often the body runs over all lanes, refused before anything is made if it is too often."""
        span = loop.count.span if isinstance(loop, t.Repeat) else loop.span
        said = "repeat is" if isinstance(loop, t.Repeat) else "the length of the range is"
        help = "clip it with max(0, ...), or state the sizes it needs with `require`"
        self.evaluator.require_all(times >= 0, "S115", lambda at: f"{said} {at(times)}", span, scope, help)
        total = int(times.sum()) if isinstance(times, np.ndarray) else times * scope.lanes
        if total > MAX_OPS:
            message = f"this loop runs {total:,} times, more than the {MAX_OPS:,} ops a schedule may have"
            self.evaluator.fail("S120", message, span, help="use smaller sizes")
        return total

    def _if(self, statement: t.If, scope: Scope, phase: str) -> InstanceOps:
        condition = self.evaluator.value(statement.condition, scope)
        if isinstance(condition, int):
            return self.body(statement.then if condition else statement.otherwise, scope.inside(), phase)
        parts: list[InstanceOps] = []
        for lanes, body in (
            (np.flatnonzero(condition), statement.then),
            (np.flatnonzero(condition == 0), statement.otherwise),
        ):
            rows = self.body(body, scope.only(lanes), phase)
            counts = np.zeros(scope.lanes, np.int64)
            counts[lanes] = rows.counts
            parts.append(InstanceOps(rows.codes, counts))
        return in_sequence(parts, scope.lanes)


def _within(value: Value, count: Value) -> Any:
    """Whether 0 <= value < count, on every lane."""
    return np.logical_and(np.greater_equal(value, 0), np.less(value, count))


def _counted(first: Value, times: Value, total: int, lanes: int) -> Int64:
    """The loop variable of each iteration: ``first``, ``first + 1``, ... on every lane."""
    if isinstance(times, int) and isinstance(first, int):
        return np.tile(np.arange(first, first + times, dtype=np.int64), lanes)
    each = np.broadcast_to(np.asarray(times, np.int64), (lanes,))
    begin = np.cumsum(each) - each
    counted: Int64 = np.arange(total, dtype=np.int64) + repeat(first - begin, each)
    return counted


def in_sequence(parts: Sequence[InstanceOps], lanes: int) -> InstanceOps:
    """The rows of ``parts`` one after the other on every lane."""
    if not parts or not lanes:
        return InstanceOps(np.empty(0, np.int64), 0)
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part.counts, int) for part in parts):
        blocks = [part.codes.reshape(lanes, -1) for part in parts if part.codes.size]
        total = sum(int(part.counts) for part in parts)
        return InstanceOps(np.concatenate(blocks, axis=1).ravel() if blocks else np.empty(0, np.int64), total)
    counts = np.stack([part.per_lane(lanes) for part in parts])
    rows = int(counts.sum())
    if counts.size * 16 < rows:
        return InstanceOps(_by_slices(parts, counts), counts.sum(axis=0))
    return InstanceOps(_by_scatter(parts, counts, rows), counts.sum(axis=0))


def _by_slices(parts: Sequence[InstanceOps], counts: Int64) -> Int64:
    """Join by copying whole runs: for few, long runs."""
    ends = np.cumsum(counts, axis=1)
    starts = ends - counts
    return np.concatenate(
        [part.codes[starts[j, lane] : ends[j, lane]] for lane in range(counts.shape[1]) for j, part in enumerate(parts)]
    )


def _by_scatter(parts: Sequence[InstanceOps], counts: Int64, rows: int) -> Int64:
    """Join by computing where each row goes: for many short runs."""
    by_lane = counts.T.ravel()
    begin = (np.cumsum(by_lane) - by_lane).reshape(counts.shape[::-1]).T
    joined = np.empty(rows, np.int64)
    for j, part in enumerate(parts):
        own = np.cumsum(counts[j]) - counts[j]
        joined[np.arange(part.codes.size) + repeat(begin[j] - own, counts[j])] = part.codes
    return joined
