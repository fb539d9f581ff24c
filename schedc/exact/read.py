"""Reads the expressions of claims as statements about costs, at known sizes and with exact fractions.

A value is a list of cases: a number, or a sum of times and costs, under a statement that says where. Sums of costs may
be compared, added, and multiplied by numbers; `NotLinear` says what else was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import TypeVar

from schedc.exact.cone import Vector
from schedc.exact.space import Space
from schedc.exact.statement import Affine, Rational, Statement, compared, contrary, holds, joint
from schedc.exact.times import IDLE, MAKESPAN, SPAN, SPAN_BUBBLE, Quantity
from schedc.step.claim_values import COMPARISONS, NoValue
from schedc.step.costs.keys import COST_SYMBOLS, ZERO_SYMBOLS
from schedc.syntax import tree
from schedc.syntax.words import METRICS

_MOST_CASES = 64


class NotLinear(Exception):
    """The expression at ``node`` is no sum of times and costs; the text says what it is."""

    def __init__(self, node: tree.Expr, why: str) -> None:
        super().__init__(why)
        self.node = node


@dataclass(frozen=True)
class Ratio:
    """``above`` / ``below``, where ``below`` is greater than 0."""

    above: Affine
    below: Affine


Number = Affine | Ratio
Result = TypeVar("Result", Number, Statement)
Cases = tuple[tuple[Statement, Number], ...]
"""Values, each with where it applies; the statements cover all costs, and agree where they overlap."""


@dataclass(frozen=True)
class ClaimReader:
    """What the names of a claim mean, at one size.

    numbers: values of the parameters, and of the names that index metrics, the rank.
    counts: by metric, [P] numbers that no cost changes. work: [P] what each rank computes, a form of the space, or None
    where it is no linear form.
    """

    space: Space
    numbers: Mapping[str, int]
    counts: Mapping[str, Sequence[int]]
    work: Sequence[Vector | None]

    @property
    def ranks(self) -> int:
        return len(self.work)

    # Truth.

    def statement(self, node: tree.Expr) -> Statement:
        """The expression as a statement. Raises `NoValue` and `NotLinear`."""
        if isinstance(node, tree.Binary) and node.op in ("and", "or"):
            return joint(node.op, (self.statement(node.left), self.statement(node.right)))
        if isinstance(node, tree.Unary) and node.op == "not":
            return contrary(self.statement(node.operand))
        if isinstance(node, tree.Binary) and node.op in COMPARISONS:
            return self._comparison(node)
        if isinstance(node, tree.Conditional):
            condition = self.statement(node.condition)
            if isinstance(condition, bool):
                return self.statement(node.then if condition else node.otherwise)
            return joint(
                "or",
                (
                    joint("and", (condition, self.statement(node.then))),
                    joint("and", (contrary(condition), self.statement(node.otherwise))),
                ),
            )
        cases = self.value(node)
        return joint("or", tuple(joint("and", (where, self._compare(node, "!=", v, None))) for where, v in cases))

    def _comparison(self, node: tree.Binary) -> Statement:
        cases = self._pairwise(node.left, node.right, lambda a, b: self._compare(node, node.op, a, b))
        return joint("or", tuple(joint("and", case) for case in cases))

    def _compare(self, node: tree.Expr, op: str, left: Number, right: Number | None) -> Statement:
        difference = left if right is None else self._sum(node, left, right, -1)
        number = self.constant(difference)
        if number is not None:
            return holds(op, number)
        return compared(op, difference.above if isinstance(difference, Ratio) else difference)

    # Numbers.

    def value(self, node: tree.Expr) -> Cases:
        """The expression as a value. Raises `NoValue` and `NotLinear`."""
        cases = _READERS[type(node)](self, node)
        if len(cases) == 1 and cases[0][0] is True:
            return cases
        kept = tuple((where, value) for where, value in cases if where is not False)
        kept = next(((case,) for case in kept if case[0] is True), kept)
        if len(kept) > _MOST_CASES:
            raise NotLinear(node, f"more than {_MOST_CASES} cases of `min`, `max`, `abs` and `if`")
        return kept

    def number(self, value: Rational) -> Affine:
        return Affine((*(0,) * len(self.space.symbols), value))

    def constant(self, value: Number) -> Rational | None:
        """The number that a value is whatever the costs; None if it follows them."""
        if isinstance(value, Ratio) or value.times or any(value.form[:-1]):
            return None
        return value.form[-1]

    def _int(self, node: tree.Int) -> Cases:
        return ((True, self.number(node.value if isinstance(node.value, int) else Fraction(repr(node.value)))),)

    def _name(self, node: tree.Name) -> Cases:
        if node.id in self.numbers:
            return ((True, self.number(self.numbers[node.id])),)
        if node.id in COST_SYMBOLS:
            return ((True, Affine(self.space.form(node.id))),)
        if node.id in self.counts:
            return ((True, self.number(max(self.counts[node.id]))),)
        if node.id in METRICS:
            return ((True, self._metric(node.id)),)
        raise NoValue(node, f"`{node.id}` means nothing in a claim")

    def _index(self, node: tree.Index) -> Cases:
        if node.name not in METRICS:
            raise NoValue(node, f"`{node.name}` is no metric")
        (where, value), *_ = self.value(node.index)
        index = self.constant(value)
        if index is None or where is not True:
            raise NoValue(node.index, "a rank cannot depend on costs")
        if index.denominator != 1 or not 0 <= index < self.ranks:
            raise NoValue(node.index, f"there is no such rank: ranks are 0 to {self.ranks - 1}")
        rank, counts = int(index), self.counts.get(node.name)
        return ((True, self._metric_of(node.name, rank) if counts is None else self.number(counts[rank])),)

    def _time(self, quantity: Quantity, count: int = 1) -> Affine:
        return Affine((0,) * self.space.dimension, ((quantity, count),))

    def _metric(self, name: str) -> Number:
        """A metric as the largest over the ranks."""
        if name == "makespan":
            return self._time(MAKESPAN)
        if name == "bubble":
            return self._time(MAKESPAN).plus(self._time(IDLE))
        if name == "span_bubble":
            return self._time(SPAN_BUBBLE)
        whole = self._time(SPAN if name == "span_bubble_ratio" else MAKESPAN)
        return Ratio(whole.plus(self._mean_work(), -1), whole)

    def _metric_of(self, name: str, rank: int) -> Number:
        """A metric of one rank; the common number of a metric without ranks."""
        if name == "bubble":
            return self._time(MAKESPAN).plus(self._work(rank), -1)
        if name == "span_bubble":
            span = self._time(("end", rank)).plus(self._time(("start", rank)), -1)
            return span.plus(self._work(rank), -1)
        return self._metric(name)

    def _work(self, rank: int) -> Affine:
        form = self.work[rank]
        return self._time(("work", rank)) if form is None else Affine(form)

    def _mean_work(self) -> Affine:
        whole = reduce(Affine.plus, (self._work(rank) for rank in range(self.ranks)))
        return whole.scaled(Fraction(1, self.ranks))

    # Operations.

    def _unary(self, node: tree.Unary) -> Cases:
        if node.op == "not":
            return self._truth(node)
        return tuple((where, self._scaled(value, -1)) for where, value in self.value(node.operand))

    def _truth(self, node: tree.Expr) -> Cases:
        """A statement as a number: 1 where it holds, else 0."""
        holds = self.statement(node)
        return ((holds, self.number(1)), (contrary(holds), self.number(0)))

    def _binary(self, node: tree.Binary) -> Cases:
        if node.op in COMPARISONS or node.op in ("and", "or"):
            return self._truth(node)
        operation = _OPERATIONS[node.op]
        return self._pairwise(node.left, node.right, lambda a, b: operation(self, node, a, b))

    def _pairwise(
        self, left: tree.Expr, right: tree.Expr, of: Callable[[Number, Number], Result]
    ) -> tuple[tuple[Statement, Result], ...]:
        """What an operation makes of two values, in every case."""
        pairs = product(self.value(left), self.value(right))
        return tuple((joint("and", (at, also)), of(a, b)) for (at, a), (also, b) in pairs)

    def _sum(self, node: tree.Expr, left: Number, right: Number, sign: int) -> Number:
        if isinstance(left, Ratio) or isinstance(right, Ratio):
            below = left.below if isinstance(left, Ratio) else right.below if isinstance(right, Ratio) else None
            assert below is not None
            first, second = (self._over(node, value, below) for value in (left, right))
            return Ratio(first.plus(second, sign), below)
        return left.plus(right, sign)

    def _over(self, node: tree.Expr, value: Number, below: Affine) -> Affine:
        """What stands above ``below`` if the value is written as a ratio."""
        if isinstance(value, Ratio):
            if value.below == below:
                return value.above
            raise NotLinear(node, "two ratios of different times")
        number = self.constant(value)
        if number is None:
            raise NotLinear(node, "a ratio beside costs")
        return below.scaled(number)

    def _scaled(self, value: Number, factor: Rational) -> Number:
        if isinstance(value, Ratio):
            return Ratio(value.above.scaled(factor), value.below)
        return value.scaled(factor)

    def _product(self, node: tree.Expr, left: Number, right: Number) -> Number:
        for value, other in ((left, right), (right, left)):
            if (factor := self.constant(other)) is not None:
                return self._scaled(value, factor)
            if isinstance(value, Ratio) and value.below == other:
                return value.above
        raise NotLinear(node, "a product of costs")

    def _quotient(self, node: tree.Expr, left: Number, right: Number) -> Number:
        if (divisor := self.constant(right)) is not None:
            if divisor == 0:
                raise NoValue(node, "it cannot be computed: division by zero")
            return self._scaled(left, Fraction(1, divisor))
        if isinstance(left, Affine) and isinstance(right, Affine) and self._positive(right):
            return Ratio(left, right)
        raise NotLinear(node, "a quotient of costs")

    def _positive(self, value: Affine) -> bool:
        """Whether a value is greater than 0 at all costs, as a sum of costs or of the makespan is; p2p may be 0."""
        parts = dict(zip(self.space.coordinates, value.form, strict=True)) | dict(value.times)
        if any(part < 0 for part in parts.values()) or any(q != MAKESPAN for q, _ in value.times):
            return False
        return any(part > 0 for name, part in parts.items() if name not in ZERO_SYMBOLS)

    def _whole(self, node: tree.Expr, left: Number, right: Number, remainder: bool) -> Number:
        first, second = self.constant(left), self.constant(right)
        if first is None or second is None:
            raise NotLinear(node, "a division of costs without its remainder, or the remainder")
        if second == 0:
            raise NoValue(node, "it cannot be computed: division by zero")
        return self.number(first % second if remainder else first // second)

    def _conditional(self, node: tree.Conditional) -> Cases:
        condition = self.statement(node.condition)
        if isinstance(condition, bool):  # the other branch may have no value
            return self.value(node.then if condition else node.otherwise)
        sides = ((condition, node.then), (contrary(condition), node.otherwise))
        return tuple((joint("and", (side, at)), value) for side, part in sides for at, value in self.value(part))

    def _call(self, node: tree.Call) -> Cases:
        if node.function not in _CALLS or not node.arguments:
            raise NoValue(node, f"`{node.function}` cannot be called so in a claim")
        return _CALLS[node.function](self, node)

    def _largest(self, node: tree.Call, sign: int) -> Cases:
        """The largest argument, or the least, as cases: each argument if it beats all other arguments."""
        result: list[tuple[Statement, Number]] = []
        for chosen in product(*(self.value(argument) for argument in node.arguments)):
            where = tuple(at for at, _ in chosen)
            values = [value for _, value in chosen]
            for i, value in enumerate(values):
                beats = (
                    self._compare(node, ">=" if sign > 0 else "<=", value, other)
                    for j, other in enumerate(values)
                    if j != i
                )
                result.append((joint("and", (*where, *beats)), value))
        return tuple(result)

    def _absolute(self, node: tree.Call) -> Cases:
        if len(node.arguments) != 1:
            raise NoValue(node, "`abs` cannot be called so in a claim")
        return tuple(
            (joint("and", (where, self._compare(node, op, value, None))), self._scaled(value, sign))
            for where, value in self.value(node.arguments[0])
            for op, sign in ((">=", 1), ("<=", -1))
        )

    def _ceildiv(self, node: tree.Call) -> Cases:
        if len(node.arguments) != 2:
            raise NoValue(node, "`ceildiv` cannot be called so in a claim")

        def up(above: Number, below: Number) -> Number:
            return self._scaled(self._whole(node, self._scaled(above, -1), below, False), -1)

        return self._pairwise(*node.arguments, up)


_READERS: Mapping[type, Callable[[ClaimReader, tree.Expr], Cases]] = {
    tree.Int: ClaimReader._int,  # type: ignore[dict-item]
    tree.Name: ClaimReader._name,  # type: ignore[dict-item]
    tree.Unary: ClaimReader._unary,  # type: ignore[dict-item]
    tree.Binary: ClaimReader._binary,  # type: ignore[dict-item]
    tree.Conditional: ClaimReader._conditional,  # type: ignore[dict-item]
    tree.Call: ClaimReader._call,  # type: ignore[dict-item]
    tree.Index: ClaimReader._index,  # type: ignore[dict-item]
}

_OPERATIONS: Mapping[str, Callable[[ClaimReader, tree.Expr, Number, Number], Number]] = {
    "+": lambda reader, node, a, b: reader._sum(node, a, b, 1),
    "-": lambda reader, node, a, b: reader._sum(node, a, b, -1),
    "*": ClaimReader._product,
    "/": ClaimReader._quotient,
    "//": lambda reader, node, a, b: reader._whole(node, a, b, False),
    "%": lambda reader, node, a, b: reader._whole(node, a, b, True),
}

_CALLS: Mapping[str, Callable[[ClaimReader, tree.Call], Cases]] = {
    "max": lambda reader, node: reader._largest(node, 1),
    "min": lambda reader, node: reader._largest(node, -1),
    "abs": ClaimReader._absolute,
    "ceildiv": ClaimReader._ceildiv,
}
