"""Values of expressions over lanes: one integer per lane, a lane being a rank or one iteration of a loop on a rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NoReturn

import numpy as np

from schedc.diagnostics import CompilerBug, Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import repeat
from schedc.ir.schedule import Int64
from schedc.source import Source, Span
from schedc.syntax import tree as t
from schedc.syntax.words import BUILTINS

Value = int | Int64
"""The same value on every lane, or [lanes] one for each."""

MAX_VALUE = 2**31 - 1
MAX_WORK = 500_000_000
"""Bound on operations times lanes of one elaboration: a few seconds."""
_WORK_OF_CALL = 500
"""What an operation costs before its first lane, in lanes."""

RANK = "rank"
"""The name under which a scope holds the rank of each lane; a keyword, so that no file can use it."""


@dataclass(eq=False)
class Scope:
    """The names that are visible on ``lanes`` lanes.

    ``index()`` gives for each lane the lane of ``parent`` that it came from; None if they are the same lanes.
    It is called only when a name of the parent is first used.
    """

    lanes: int
    names: dict[str, Value]
    parent: Scope | None = None
    index: Callable[[], Int64] | None = None

    def lookup(self, name: str) -> Value:
        """The value of ``name`` on these lanes. `check` has made sure that it exists."""
        if name in self.names:
            return self.names[name]
        if self.parent is None:
            raise CompilerBug("evaluate", f"`{name}` was not checked")
        value = self.parent.lookup(name)
        if self.index is not None and isinstance(value, np.ndarray):
            value = self.names[name] = value[self._index()]
        return value

    def _index(self) -> Int64:
        assert self.index is not None
        found = self.index()
        self.index = lambda: found
        return found

    def inside(self, names: dict[str, Value] | None = None) -> Scope:
        """A scope on the same lanes that may hold names of its own."""
        return Scope(self.lanes, names or {}, self)

    def only(self, lanes: Int64) -> Scope:
        """The scope of some of the lanes."""
        return Scope(int(lanes.size), {}, self, lambda: lanes)

    def repeated(self, times: Value, total: int, names: dict[str, Value] | None = None) -> Scope:
        """Each lane ``times`` times, ``total`` in all."""
        return Scope(total, names or {}, self, lambda: repeat(np.arange(self.lanes, dtype=np.int64), times))

    def has(self, name: str) -> bool:
        return name in self.names or (self.parent is not None and self.parent.has(name))


@dataclass
class Evaluator:
    """Evaluates expressions of one schedule. ``sizes`` are named in messages; ``functions`` are those of the file."""

    source: Source
    sizes: Mapping[str, int]
    functions: dict[str, t.Function] = field(default_factory=dict)
    work: int = 0

    def value(self, expr: t.Expr, scope: Scope) -> Value:
        """The value of ``expr`` on the lanes of ``scope``; every step is bounded by `MAX_VALUE`."""
        self.spend(scope.lanes, expr.span)
        match expr:
            case t.Int(value=value):
                return int(value)
            case t.Name(id=name):
                return scope.lookup(name)
            case t.Unary(op="-", operand=operand):
                return -self.value(operand, scope)
            case t.Unary(operand=operand):
                return _truth(self.value(operand, scope), False)
            case t.Binary(op="and" | "or"):
                return self._logic(expr, scope)
            case t.Binary(op=op, left=left, right=right):
                return self._binary(op, self.value(left, scope), self.value(right, scope), expr.span, scope)
            case t.Conditional(condition=condition, then=then, otherwise=otherwise):
                chosen = _truth(self.value(condition, scope), True)
                return self._choose(chosen, lambda s: self.value(then, s), lambda s: self.value(otherwise, s), scope)
            case t.Call():
                return self._call(expr, scope)
            case _:
                raise CompilerBug("evaluate", f"`{type(expr).__name__}` outside of a claim was not refused")

    def spend(self, lanes: int, span: Span) -> None:
        """Account for one operation on ``lanes`` lanes."""
        self.work += lanes + _WORK_OF_CALL
        if self.work > MAX_WORK:
            message = "this schedule takes too many steps to elaborate"
            self.fail("S120", message, span, help="use smaller sizes, or call fewer functions inside functions")

    def _logic(self, expr: t.Binary, scope: Scope) -> Value:
        """``and`` and ``or`` look at their right side only on the lanes where the left side does not decide."""
        left = _truth(self.value(expr.left, scope), True)

        def right(inner: Scope) -> Value:
            return _truth(self.value(expr.right, inner), True)

        if expr.op == "and":
            return self._choose(left, right, lambda _: 0, scope)
        return self._choose(left, lambda _: 1, right, scope)

    def _choose(
        self, chosen: Value, then: Callable[[Scope], Value], otherwise: Callable[[Scope], Value], scope: Scope
    ) -> Value:
        """``then`` on the lanes where ``chosen`` is 1 and ``otherwise`` on the others."""
        if isinstance(chosen, int):
            return then(scope) if chosen else otherwise(scope)
        result = np.empty(scope.lanes, np.int64)
        for branch, lanes in ((then, np.flatnonzero(chosen)), (otherwise, np.flatnonzero(chosen == 0))):
            if lanes.size:
                result[lanes] = branch(scope.only(lanes))
        return result

    def _binary(self, op: str, a: Value, b: Value, span: Span, scope: Scope) -> Value:
        if op in ("/", "//", "%"):
            self.require_all(b != 0, "S116", "division by zero", span, scope)
        if op == "/":
            exact = a % b == 0
            help = "use // to round down"
            self.require_all(exact, "S116", lambda at: f"{at(a)} / {at(b)} is not exact", span, scope, help)
        return self._bounded(_as_value(_OPERATORS[op](a, b)), span)

    def _bounded(self, value: Value, span: Span) -> Value:
        extremes = (int(value.min()), int(value.max())) if isinstance(value, np.ndarray) else (value, value)
        if beyond := [extreme for extreme in extremes if abs(extreme) > MAX_VALUE]:
            self.fail("S116", f"the value {beyond[-1]} is beyond {MAX_VALUE}", span)
        return value

    def _call(self, call: t.Call, scope: Scope) -> Value:
        arguments = [self.value(argument, scope) for argument in call.arguments]
        if call.function in BUILTINS:
            return self._builtin(call, arguments, scope)
        function = self.functions[call.function]
        return self.value(function.body, scope.inside(dict(zip(function.parameters, arguments, strict=True))))

    def _builtin(self, call: t.Call, arguments: list[Value], scope: Scope) -> Value:
        if call.function == "ceildiv":
            self.require_all(arguments[1] != 0, "S116", "division by zero", call.span, scope)
        if call.function == "abs":
            return _as_value(abs(arguments[0]))
        result: Any = reduce(_BUILTINS[call.function], arguments)
        return _as_value(result)

    # ---- faults

    def require_all(
        self,
        good: Any,
        code: str,
        message: str | Callable[[Callable[[Value], int]], str],
        span: Span,
        scope: Scope,
        help: str = "",
    ) -> None:
        """Fail on the first lane where ``good`` is false. ``message`` may name values there: ``at(value)``."""
        lane = _first_false(good)
        if lane is None:
            return

        def at(value: Value) -> int:
            return int(value[lane]) if isinstance(value, np.ndarray) else value

        said = message if isinstance(message, str) else message(at)
        rank = at(scope.lookup(RANK)) if scope.has(RANK) else None
        self.fail(code, said, span, help=help, rank=rank)

    def where(self, rank: int | None = None) -> str:
        """The sizes, and the rank if there is one, as messages name them: ``rank 3, P = 4, M = 7``."""
        sizes = [f"{name} = {value}" for name, value in self.sizes.items()]
        return ", ".join([*([f"rank {rank}"] if rank is not None else []), *sizes])

    def fail(self, code: str, message: str, span: Span, *, help: str = "", rank: int | None = None) -> NoReturn:
        where = self.where(rank)
        said = f"{message} for {where}" if where else message
        raise DiagnosticError([Diagnostic(code, said, Label(span), help=help, source=self.source)])


def _first_false(good: Any) -> int | None:
    """The first lane where ``good`` does not hold; 0 stands for all lanes of a scalar."""
    if isinstance(good, np.ndarray):
        return None if good.all() else int(np.argmin(good))
    return None if good else 0


def _truth(value: Value, wanted: bool) -> Value:
    """1 where the truth of ``value`` is ``wanted``, else 0."""
    if isinstance(value, np.ndarray):
        truth: Int64 = ((value != 0) == wanted).astype(np.int64)
        return truth
    return int((value != 0) == wanted)


def _as_value(result: Any) -> Value:
    """What an operator made, truth values and numpy scalars included, as a `Value`."""
    if not isinstance(result, np.ndarray) or not result.ndim:
        return int(result)
    array: Int64 = result.astype(np.int64, copy=False)
    return array


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "//": operator.floordiv,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_BUILTINS: dict[str, Callable[[Any, Any], Any]] = {
    "min": np.minimum,
    "max": np.maximum,
    "ceildiv": lambda a, b: -(-a // b),
}
"""The functions of two and more arguments; `abs` is the one of one."""
