"""Evaluates expressions on many instances at once.

An *instance* is one execution of a statement: on one rank, in one iteration of the loops around the statement. A value
is one integer per instance, or one integer for all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NoReturn

import numpy as np

from schedc.diagnostics import CompilerBug, Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Int64, repeat
from schedc.source import Source, Span
from schedc.syntax import tree as t
from schedc.syntax.words import BUILTINS

Value = int | Int64
"""One integer for all instances, or [instances] one for each."""

MAX_VALUE = 2**31 - 1
"""Largest absolute value of any expression, intermediate values included."""
MAX_WORK = 500_000_000
"""Bound on operations times instances of one elaboration: a few seconds."""
_WORK_OF_CALL = 500
"""Fixed cost of one operation, counted in instances."""

RANK = "rank"
"""The name under which a scope holds the rank of each instance. It is a keyword, so no file can define it."""


@dataclass(eq=False)
class Scope:
    """The names that are visible to a statement.

    instances: number of instances that run the statement.
    index: function that gives [instances], the instance of ``parent`` that each instance came from. None: both have the
        same instances. Called only when a name of the parent is first used.
    """

    instances: int
    names: dict[str, Value]
    parent: Scope | None = None
    index: Callable[[], Int64] | None = None

    def lookup(self, name: str) -> Value:
        """The value of ``name`` on these instances. `check` guarantees that the name exists."""
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
        index = self.index()
        self.index = lambda: index
        return index

    def inside(self, names: dict[str, Value] | None = None) -> Scope:
        """A nested scope on the same instances, for names of its own."""
        return Scope(self.instances, names or {}, self)

    def only(self, instances: Int64) -> Scope:
        """A nested scope on some of the instances. instances: [n] their numbers."""
        return Scope(int(instances.size), {}, self, lambda: instances)

    def repeated(self, times: Value, total: int, names: dict[str, Value] | None = None) -> Scope:
        """A nested scope with ``times`` copies of each instance, ``total`` in all."""
        return Scope(total, names or {}, self, lambda: repeat(np.arange(self.instances, dtype=np.int64), times))

    def has(self, name: str) -> bool:
        return name in self.names or (self.parent is not None and self.parent.has(name))


@dataclass
class Evaluator:
    """Evaluates the expressions of one schedule.

    sizes: value of each size, named in messages. functions: functions of the schedule by name.
    work: operations times instances so far.
    """

    source: Source
    sizes: Mapping[str, int]
    functions: dict[str, t.Function] = field(default_factory=dict)
    work: int = 0

    def value(self, expr: t.Expr, scope: Scope) -> Value:
        """The value of ``expr`` on the instances of ``scope``. Every intermediate value is within `MAX_VALUE`."""
        self.spend(scope.instances, expr.span)
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

    def spend(self, instances: int, span: Span) -> None:
        """Count one operation on ``instances`` instances; refuse (S120) beyond `MAX_WORK`."""
        self.work += instances + _WORK_OF_CALL
        if self.work > MAX_WORK:
            message = "this schedule takes too many steps to elaborate"
            self.fail("S120", message, span, help="use smaller sizes, or call fewer functions inside functions")

    def _logic(self, expr: t.Binary, scope: Scope) -> Value:
        """Evaluate ``and`` or ``or``: the right side only on the instances where the left side does not decide."""
        left = _truth(self.value(expr.left, scope), True)

        def right(inner: Scope) -> Value:
            return _truth(self.value(expr.right, inner), True)

        if expr.op == "and":
            return self._choose(left, right, lambda _: 0, scope)
        return self._choose(left, lambda _: 1, right, scope)

    def _choose(
        self, chosen: Value, then: Callable[[Scope], Value], otherwise: Callable[[Scope], Value], scope: Scope
    ) -> Value:
        """Evaluate ``then`` on the instances where ``chosen`` is 1, and ``otherwise`` on the others."""
        if isinstance(chosen, int):
            return then(scope) if chosen else otherwise(scope)
        result = np.empty(scope.instances, np.int64)
        for branch, instances in ((then, np.flatnonzero(chosen)), (otherwise, np.flatnonzero(chosen == 0))):
            if instances.size:
                result[instances] = branch(scope.only(instances))
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
        """Fail on the first instance where ``good`` is false.

        message: a text, or a function that is given ``at``; ``at(value)`` is a value on that instance.
        """
        instance = _first_false(good)
        if instance is None:
            return

        def at(value: Value) -> int:
            return int(value[instance]) if isinstance(value, np.ndarray) else value

        text = message if isinstance(message, str) else message(at)
        rank = at(scope.lookup(RANK)) if scope.has(RANK) else None
        self.fail(code, text, span, help=help, rank=rank)

    def where(self, rank: int | None = None) -> str:
        """The rank, if any, and the sizes, as messages name them: ``rank 3, P = 4, M = 7``."""
        sizes = [f"{name} = {value}" for name, value in self.sizes.items()]
        return ", ".join([*([f"rank {rank}"] if rank is not None else []), *sizes])

    def fail(self, code: str, message: str, span: Span, *, help: str = "", rank: int | None = None) -> NoReturn:
        """Raise `DiagnosticError` with one finding, whose message ends with the rank and the sizes."""
        where = self.where(rank)
        text = f"{message} for {where}" if where else message
        raise DiagnosticError([Diagnostic(code, text, Label(span), help=help, source=self.source)])


def _first_false(good: Any) -> int | None:
    """The first instance where ``good`` does not hold, or None. For a scalar, which holds everywhere or nowhere, 0."""
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
    """The result of an operator as a `Value`: truth values and numpy scalars become integers."""
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
"""The functions of two or more arguments. `abs`, with one argument, is apart."""
