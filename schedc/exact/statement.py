"""Statements about costs: comparisons of sums of times and linear forms with 0, joined by `and` and `or`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

from schedc.exact.cone import Vector, dot
from schedc.exact.times import Quantity

Rational = int | Fraction
"""A number, exactly; most are integers, with which Python is faster."""

CONTRARY = {"==": "!=", "!=": "==", "<=": ">", ">": "<=", ">=": "<", "<": ">="}
CLOSED = frozenset({"==", "<=", ">="})
"""Comparisons that hold in a limit if they hold on the way there."""

SIGNS = {"==": {0}, "!=": {-1, 1}, "<=": {-1, 0}, "<": {-1}, ">=": {0, 1}, ">": {1}}
"""The signs of a value at which each comparison with 0 holds."""


def holds(op: str, value: Rational) -> bool:
    """Whether ``value`` op 0."""
    return (value > 0) - (value < 0) in SIGNS[op]


@dataclass(frozen=True)
class Affine:
    """A sum of costs and times: ``form`` . x plus each time of ``times``, multiplied by its factor."""

    form: tuple[Rational, ...]
    times: tuple[tuple[Quantity, Rational], ...] = ()

    def plus(self, other: Affine, factor: Rational = 1) -> Affine:
        form = tuple(a + factor * b for a, b in zip(self.form, other.form, strict=True))
        if not other.times:
            return Affine(form, self.times)
        times = dict(self.times)
        for quantity, count in other.times:
            times[quantity] = times.get(quantity, 0) + factor * count
        return Affine(form, tuple((q, c) for q, c in sorted(times.items()) if c))

    def scaled(self, factor: Rational) -> Affine:
        return Affine((0,) * len(self.form)).plus(self, factor)


@dataclass(frozen=True)
class Comparison:
    """A comparison with 0: ``form`` . x plus each time multiplied by its factor, ``op`` 0. All are integers.

    form: [coordinates]. times: each with a factor without unit.
    """

    op: str
    form: Vector
    times: tuple[tuple[Quantity, int], ...] = ()

    @classmethod
    def of(cls, op: str, value: Affine) -> Comparison:
        scale = lcm(*(c.denominator for c in (*value.form, *(c for _, c in value.times))))
        form = tuple(int(c * scale) for c in value.form)
        return cls(op, form, tuple((q, int(c * scale)) for q, c in value.times))


@dataclass(frozen=True)
class Joined:
    """A conjunction (``and``) or disjunction (``or``) of the parts."""

    word: str
    parts: tuple[Statement, ...]


Statement = bool | Comparison | Joined


def joint(word: str, parts: Iterator[Statement] | tuple[Statement, ...]) -> Statement:
    """The parts joined by ``word``, without those that decide nothing."""
    settles = word == "or"
    kept: dict[Statement, None] = {}
    for part in parts:
        if part is settles:
            return settles
        if not isinstance(part, bool):
            inner = part.parts if isinstance(part, Joined) and part.word == word else (part,)
            kept |= dict.fromkeys(inner)
    if not kept:
        return not settles
    return next(iter(kept)) if len(kept) == 1 else Joined(word, tuple(kept))


def contrary(statement: Statement) -> Statement:
    """The negation of the statement."""
    if isinstance(statement, bool):
        return not statement
    if isinstance(statement, Comparison):
        return Comparison(CONTRARY[statement.op], statement.form, statement.times)
    return joint("and" if statement.word == "or" else "or", tuple(contrary(part) for part in statement.parts))


def mapped(statement: Statement, change: Callable[[Comparison], Comparison]) -> Statement:
    """The statement with each comparison changed."""
    if isinstance(statement, Comparison):
        return change(statement)
    if isinstance(statement, Joined):
        return Joined(statement.word, tuple(mapped(part, change) for part in statement.parts))
    return statement


def stripped(statement: Statement) -> Statement:
    """The statement without the last coordinate, whose coefficient is 0 in all its comparisons."""
    return mapped(statement, lambda c: Comparison(c.op, c.form[:-1], c.times))


def linearized(statement: Statement, forms: Mapping[Quantity, Vector]) -> Statement:
    """The statement with each time replaced by a linear form."""

    def change(comparison: Comparison) -> Comparison:
        parts = ([count * c for c in forms[quantity]] for quantity, count in comparison.times)
        return Comparison(comparison.op, tuple(map(sum, zip(comparison.form, *parts, strict=True))))

    return mapped(statement, change)


def compared(op: str, value: Affine) -> Statement:
    """The comparison of a value with 0, decided at once where the value is 0 everywhere."""
    if not value.times and not any(value.form):
        return holds(op, 0)
    return Comparison.of(op, value)


def comparisons(statement: Statement) -> Iterator[Comparison]:
    if isinstance(statement, Comparison):
        yield statement
    elif isinstance(statement, Joined):
        for part in statement.parts:
            yield from comparisons(part)


def closed(statement: Statement) -> bool:
    """Whether a statement holds in a limit wherever it holds on the way there."""
    return all(c.op in CLOSED for c in comparisons(statement))


def quantities(statement: Statement) -> tuple[Quantity, ...]:
    """The times of a statement, each once."""
    return tuple(dict.fromkeys(q for c in comparisons(statement) for q, _ in c.times))


def truth(statement: Statement, of: Callable[[Comparison], bool | None]) -> bool | None:
    """Whether a statement holds, given whether its comparisons do; None where that is open."""
    if isinstance(statement, bool):
        return statement
    if isinstance(statement, Comparison):
        return of(statement)
    settles, open_ = statement.word == "or", False
    for part in statement.parts:
        holding = truth(part, of)
        if holding is settles:
            return settles
        open_ |= holding is None
    return None if open_ else not settles


def true_at(statement: Statement, vector: Vector, times: Mapping[Quantity, int]) -> bool:
    """Whether a statement holds at a ``vector`` [coordinates], given the times there in the unit of the costs."""

    def of(comparison: Comparison) -> bool:
        return holds(comparison.op, dot(comparison.form, vector) + sum(n * times[q] for q, n in comparison.times))

    return bool(truth(statement, of))


def holds_at(statement: Statement, points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[n] whether a statement without times holds at each of ``points`` [n, coordinates]."""
    if isinstance(statement, bool):
        return np.full(len(points), statement)
    if isinstance(statement, Comparison):
        return np.isin(np.sign(points @ np.array(statement.form)), [*SIGNS[statement.op]])
    join = np.logical_and if statement.word == "and" else np.logical_or
    return np.asarray(join.reduce([holds_at(part, points) for part in statement.parts]))


def conjunctions(statement: Statement) -> list[tuple[Comparison, ...]]:
    """The statement as alternatives, in each of which all comparisons hold; none has ``!=``."""
    if isinstance(statement, bool):
        return [()] if statement else []
    if isinstance(statement, Comparison):
        if statement.op != "!=":
            return [(statement,)]
        return [(Comparison(op, statement.form, statement.times),) for op in ("<", ">")]
    if statement.word == "or":
        return [alternative for part in statement.parts for alternative in conjunctions(part)]
    result: list[tuple[Comparison, ...]] = [()]
    for part in statement.parts:
        result = [(*first, *second) for first in result for second in conjunctions(part)]
    return result
