"""Expands the body of a rank block to the ops of all ranks at once: a loop multiplies instances and never runs.

An *instance* is one execution of a statement: on one rank, in one iteration of the loops around the statement. A
statement gives every instance some ops. An op is one integer, its *code*, which packs the op of the text (its item),
the chunk and the microbatch that the text names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedc.diagnostics import CompilerBug, Diagnostic, DiagnosticError
from schedc.elaborate.evaluate import RANK, Evaluator, Scope, Value
from schedc.elaborate.walk import in_order
from schedc.ir.arrays import Int64, repeat
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.source import Span
from schedc.syntax import tree as t

MAX_OPS = 20_000_000
"""Most ops of a schedule, over all ranks; also most iterations of one loop."""

MAX_FINDINGS = 10
"""Most reported findings of a kind."""

_CHUNK_SHIFT, _MICROBATCH_SHIFT = 20, 36
_ITEM_MASK = (1 << _CHUNK_SHIFT) - 1
_CHUNK_MASK = (1 << (_MICROBATCH_SHIFT - _CHUNK_SHIFT)) - 1


@dataclass(frozen=True)
class ExpandedItem:
    """One op of the text.

    half: 1 for the first op of a pair, 2 for the second, 0 for a single op.
    computed: whether the op is in a computed order, where its place in the text is not its place in the order.
    """

    kind: OpKind
    phase: str
    span: Span
    half: int
    computed: bool = False


@dataclass(frozen=True)
class InstanceOps:
    """The ops of some instances.

    codes: [ops] codes of the ops, instance by instance.
    counts: [instances] number of ops of each instance, or one number for all of them.
    """

    codes: Int64
    counts: Value

    def per_instance(self, instances: int) -> Int64:
        """[instances] number of ops of each instance."""
        counts: Int64 = np.broadcast_to(np.asarray(self.counts, np.int64), (instances,))
        return counts


def pack_like(codes: Int64, item: int) -> Int64:
    """[ops] codes of another item, with the chunks and the microbatches of ``codes`` ([ops])."""
    return (codes & ~_ITEM_MASK) | item


def unpack(codes: Int64) -> tuple[Int64, Int64, Int64]:
    """Item, chunk and microbatch of each code, [ops] each; -1 for a chunk or microbatch that the text does not name."""
    return codes & _ITEM_MASK, ((codes >> _CHUNK_SHIFT) & _CHUNK_MASK) - 1, (codes >> _MICROBATCH_SHIFT) - 1


@dataclass
class Expander:
    """Expands statements.

    items: the ops of the text that were expanded so far. ops: number of ops so far, over all instances.
    findings: faults so far. Expansion goes on after a fault, to report others in the same run.
    computed: whether the statement that is expanded is in a computed order.
    """

    evaluator: Evaluator
    placement: Placement
    items: list[ExpandedItem] = field(default_factory=list)
    ops: int = 0
    findings: list[Diagnostic] = field(default_factory=list)
    computed: bool = False

    def __post_init__(self) -> None:
        chunks = (self.placement.stage_of_chunk >= 0).sum(axis=1).astype(np.int64)
        self.chunks: Value = int(chunks[0]) if (chunks == chunks[0]).all() else chunks
        """[ranks] number of chunks of each rank, or one number for all ranks."""

    def body(self, statements: Sequence[t.Statement], scope: Scope, phase: str) -> InstanceOps:
        """The ops of a sequence of statements, which each instance runs in order."""
        parts: list[InstanceOps] = []
        for statement in statements if scope.instances else ():
            try:
                parts += self._statement(statement, scope, phase)
            except DiagnosticError as error:
                self.findings += error.diagnostics
                fatal = isinstance(statement, t.Let) or any(d.code == "S120" for d in error.diagnostics)
                if fatal or len(self.findings) >= MAX_FINDINGS:  # otherwise, look for faults in what follows
                    raise DiagnosticError(self._unique()) from None
        return in_sequence(parts, scope.instances)

    def _unique(self) -> list[Diagnostic]:
        """Take all findings, without repetitions: every loop around a fault adds the fault anew."""
        findings, self.findings = list(dict.fromkeys(self.findings)), []
        return findings

    def _statement(self, statement: t.Statement, scope: Scope, phase: str) -> list[InstanceOps]:
        value = self.evaluator.value
        self.evaluator.spend(scope.instances, statement.span)
        match statement:
            case t.Let(name=name, value=expr):
                scope.names[name] = value(expr, scope)
                return []
            case t.OpItem():
                return [self._op(statement, scope, phase, 0)]
            case t.PairItem():
                return [self._op(op, scope, phase, half) for half, op in enumerate(in_order(statement), 1)]
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
        """One op of the text on every instance. half: as in `ExpandedItem`."""
        self.ops += scope.instances
        if self.ops > MAX_OPS:
            message = f"the schedule has more than {MAX_OPS:,} ops"
            self.evaluator.fail("S120", message, op.span, help="use smaller sizes")
        code: Value = len(self.items)
        self.items.append(ExpandedItem(OpKind[op.kind], phase, op.span, half, self.computed))
        code = code + ((self._chunk(op, scope) + 1) << _CHUNK_SHIFT)
        if op.microbatch is not None:
            code = code + ((self._microbatch(op, op.microbatch, scope) + 1) << _MICROBATCH_SHIFT)
        return InstanceOps(np.full(scope.instances, code, np.int64) if isinstance(code, int) else code, 1)

    def _chunk(self, op: t.OpItem, scope: Scope) -> Value:
        """The chunk of an op; -1 only for a W that takes the oldest pending one of any chunk."""
        chunks = self.chunks if isinstance(self.chunks, int) else self.chunks[scope.lookup(RANK)]
        if op.chunk is None:
            if op.kind == "W" and op.microbatch is None:
                return -1
            message = "a rank with several chunks, and none is named"
            help = f"say which: {op.kind}0, {op.kind}1 or {op.kind}[expression]"
            self.evaluator.require_all(chunks == 1, "S110", message, op.span, scope, help)
            return 0
        chunk = self.evaluator.value(op.chunk, scope)
        self.evaluator.require_all(
            _within(chunk, chunks),
            "S117",
            lambda at: f"chunk {at(chunk)} of a rank with {at(chunks)} (numbered from 0)",
            op.chunk.span,
            scope,
            "a digit or [expression] after an op is its chunk; `@` names a microbatch",
        )
        return chunk

    def _microbatch(self, op: t.OpItem, expr: t.Expr, scope: Scope) -> Value:
        """The microbatch that ``@`` names, counted within the pipe of the chunk."""
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
        """The ops of a loop.

        times: iterations of each instance; each becomes an instance of ``body``. first: value of the loop variable in
        the first iteration, None for a `repeat`.
        """
        total = self._iterations(loop, times, scope)
        names: dict[str, Value] = {}
        if isinstance(loop, t.For) and first is not None:
            names[loop.name] = _counted(first, times, total, scope.instances)
        rows = self.body(body, scope.repeated(times, total, names), phase)
        if isinstance(rows.counts, int):
            return InstanceOps(rows.codes, times * rows.counts)
        ends = np.concatenate([[0], np.cumsum(rows.counts)])
        instances = np.concatenate([[0], np.cumsum(np.broadcast_to(times, (scope.instances,)))])
        return InstanceOps(rows.codes, np.diff(ends[instances]))

    def _iterations(self, loop: t.Repeat | t.For, times: Value, scope: Scope) -> int:
        """Iterations of a loop over all instances; too many are refused (S120) before memory is needed for them."""
        span = loop.count.span if isinstance(loop, t.Repeat) else loop.span
        subject = "repeat is" if isinstance(loop, t.Repeat) else "the length of the range is"
        help = "clip it with max(0, ...), or state the sizes it needs with `require`"
        self.evaluator.require_all(times >= 0, "S115", lambda at: f"{subject} {at(times)}", span, scope, help)
        total = int(times.sum()) if isinstance(times, np.ndarray) else times * scope.instances
        if total > MAX_OPS:
            message = f"this loop runs {total:,} times, more than the {MAX_OPS:,} ops a schedule may have"
            self.evaluator.fail("S120", message, span, help="use smaller sizes")
        return total

    def _if(self, statement: t.If, scope: Scope, phase: str) -> InstanceOps:
        condition = self.evaluator.value(statement.condition, scope)
        if isinstance(condition, int):
            return self.body(statement.then if condition else statement.otherwise, scope.inside(), phase)
        parts: list[InstanceOps] = []
        for instances, body in (
            (np.flatnonzero(condition), statement.then),
            (np.flatnonzero(condition == 0), statement.otherwise),
        ):
            rows = self.body(body, scope.only(instances), phase)
            counts = np.zeros(scope.instances, np.int64)
            counts[instances] = rows.counts
            parts.append(InstanceOps(rows.codes, counts))
        return in_sequence(parts, scope.instances)


def _within(value: Value, count: Value) -> Any:
    """[instances] whether 0 <= value < count."""
    return np.logical_and(np.greater_equal(value, 0), np.less(value, count))


def _counted(first: Value, times: Value, total: int, instances: int) -> Int64:
    """[total] the loop variable of each iteration: ``first``, ``first + 1``, ... on every instance."""
    if isinstance(times, int) and isinstance(first, int):
        return np.tile(np.arange(first, first + times, dtype=np.int64), instances)
    each = np.broadcast_to(np.asarray(times, np.int64), (instances,))
    begin = np.cumsum(each) - each
    counted: Int64 = np.arange(total, dtype=np.int64) + repeat(first - begin, each)
    return counted


def in_sequence(parts: Sequence[InstanceOps], instances: int) -> InstanceOps:
    """The ops of ``parts`` one after the other on every instance."""
    if not parts or not instances:
        return InstanceOps(np.empty(0, np.int64), 0)
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part.counts, int) for part in parts):
        blocks = [part.codes.reshape(instances, -1) for part in parts if part.codes.size]
        total = sum(int(part.counts) for part in parts)
        return InstanceOps(np.concatenate(blocks, axis=1).ravel() if blocks else np.empty(0, np.int64), total)
    counts = np.stack([part.per_instance(instances) for part in parts])
    rows = int(counts.sum())
    if counts.size * 16 < rows:
        return InstanceOps(_by_slices(parts, counts), counts.sum(axis=0))
    return InstanceOps(_by_scatter(parts, counts, rows), counts.sum(axis=0))


def _by_slices(parts: Sequence[InstanceOps], counts: Int64) -> Int64:
    """Join by copying whole runs of ops: fast for few, long runs. counts: [parts, instances]."""
    ends = np.cumsum(counts, axis=1)
    starts = ends - counts
    return np.concatenate(
        [
            part.codes[starts[j, instance] : ends[j, instance]]
            for instance in range(counts.shape[1])
            for j, part in enumerate(parts)
        ]
    )


def _by_scatter(parts: Sequence[InstanceOps], counts: Int64, rows: int) -> Int64:
    """Join by computing where each op goes: fast for many short runs. counts: [parts, instances]; rows: their sum."""
    by_instance = counts.T.ravel()
    begin = (np.cumsum(by_instance) - by_instance).reshape(counts.shape[::-1]).T
    joined = np.empty(rows, np.int64)
    for j, part in enumerate(parts):
        own = np.cumsum(counts[j]) - counts[j]
        joined[np.arange(part.codes.size) + repeat(begin[j] - own, counts[j])] = part.codes
    return joined
