"""Judges claims without `schedc.exact`: at every integer cost vector of a grid, simulated, in fractions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from schedc.ir.ops import OpKind
from schedc.step.batch import simulate_batch
from schedc.step.costs.batch import CostBatch
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.syntax import tree

SYMBOLS = ("F", "I", "W", "B", "R", "FB", "p2p")
Column = Any
"""[K] values as Python's ints and fractions (an object array), or one of them for all vectors."""


def symbols_of(dependencies: Dependencies, named: set[str]) -> tuple[str, ...]:
    """The free costs of claims that name those: B follows from I and W where the order has an I."""
    schedule = dependencies.schedule
    kinds = {OpKind(kind).name for kind in np.unique(schedule.kind)}
    free = {"F"} | (named & set(SYMBOLS)) | (kinds & {"R"})
    backward = np.isin(schedule.kind[dependencies.second], (OpKind.B, OpKind.I))
    free |= {"FB"} if (dependencies.pairs & backward).any() else set()  # a pair with a W takes the time of both
    free = (free | {"I", "W"}) - {"B"} if "I" in kinds else free | {"B"}
    return tuple(s for s in SYMBOLS if s in free)


def grid(symbols: Sequence[str], draw: np.random.Generator | None = None) -> list[dict[str, int]]:
    """All costs of 1 to 7 (1 to 5 of more than 3 symbols; p2p from 0) in the domain, and some larger ones."""
    top = 7 if len(symbols) <= 3 else 5
    ranges = [range(0 if s == "p2p" else 1, top + 1) for s in symbols]
    vectors = [dict(zip(symbols, values, strict=True)) for values in product(*ranges)]
    if draw is not None:
        larger = np.exp(draw.uniform(0, np.log(500), (40, len(symbols)))).astype(int).tolist()
        vectors += [dict(zip(symbols, values, strict=True)) for values in larger]
    return [v for v in vectors if in_domain(v)]


def in_domain(costs: Mapping[str, Any]) -> bool:
    if any(cost < 0 or (cost == 0 and s != "p2p") for s, cost in costs.items()):
        return False
    if "FB" not in costs:
        return True
    F, B = costs["F"], whole_backward(costs)
    return bool(max(F, B) <= costs["FB"] <= F + B)


def whole_backward(costs: Mapping[str, Any]) -> Any:
    return costs["B"] if "B" in costs else costs["I"] + costs["W"]


@dataclass(eq=False)
class Grid:
    """Cost vectors with what a schedule takes under them.

    symbols: the free costs of the vectors. unit: what the integers are divided by.
    """

    dependencies: Dependencies
    vectors: list[dict[str, int]]
    unit: int = 1
    _columns: dict[tuple[str, int], Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        K = len(self.vectors)
        costs = {s: np.array([v[s] for v in self.vectors], np.float64) for s in self.vectors[0]}
        assert all((column < 2**40).all() for column in costs.values())
        costs.setdefault("B", whole_backward({s: costs.get(s, np.ones(K)) for s in (*SYMBOLS[:3], *costs)}))
        self.outcomes = simulate_batch(
            self.dependencies, CostBatch(**{s: costs.get(s, np.ones(K)) for s in ("F", "I", "W")} | costs)
        )
        self.memory = measure_memory(self.dependencies.schedule, None, self.dependencies)
        self.costs = {s: self._exact(column) for s, column in costs.items()}

    def _exact(self, column: Any) -> Column:
        """[K] doubles as exact numbers, in units."""
        assert (column == np.floor(column)).all()
        integers = column.astype(np.int64).astype(object)
        return integers if self.unit == 1 else quotient(integers, self.unit)

    @property
    def ranks(self) -> int:
        return self.dependencies.schedule.ranks

    def metric(self, name: str, rank: int | None) -> Column:
        """[K] a metric of one rank, or without one of the rank where it is largest."""
        key = (name, -1 if rank is None else rank)
        if key not in self._columns:
            self._columns[key] = self._metric(name, rank)
        return self._columns[key]

    def _metric(self, name: str, rank: int | None) -> Column:
        if name == "makespan":
            return self._exact(self.outcomes.makespan)
        if name == "bubble_ratio":
            work = sum(self._exact(row) for row in self.outcomes.busy)
            whole = self.metric("makespan", None) * self.ranks
            return quotient(whole - work, whole)
        if name == "span_bubble_ratio":
            work = sum(self._exact(row) for row in self.outcomes.busy)
            whole = self._exact(self.outcomes.span.max(axis=0)) * self.ranks
            return quotient(whole - work, whole)
        if name in ("bubble", "span_bubble"):
            rows = (self.outcomes.makespan if name == "bubble" else self.outcomes.span) - self.outcomes.busy
            return self._exact(rows.max(axis=0) if rank is None else rows[rank])
        starts = self.dependencies.schedule.rank_start
        counts = np.diff(starts) if name == "ops" else getattr(self.memory, name)
        return int(counts.max() if rank is None else counts[rank])


quotient: Callable[[Any, Any], Any] = np.frompyfunc(lambda a, b: Fraction(a) / b, 2, 1)


def truth(node: tree.Expr | None, grid: Grid, variables: Sequence[str]) -> Any:
    """[K] whether an expression holds, for every rank that the variables may be."""
    result = np.ones(len(grid.vectors), bool)
    for rank in range(grid.ranks if variables else 1):
        if node is not None:
            result &= as_bool(value(node, grid, dict.fromkeys(variables, rank)))
    return result


def value(node: tree.Expr, grid: Grid, ranks: Mapping[str, int]) -> Column:
    """[K] the value of an expression, or one value where no cost matters to it."""
    match node:
        case tree.Int():
            return node.value if isinstance(node.value, int) else Fraction(str(node.value))
        case tree.Name(id=name):
            for names in (ranks, grid.dependencies.schedule.sizes, grid.costs):
                if name in names:
                    return names[name]  # type: ignore[index]
            return grid.metric(name, None)
        case tree.Index(name=name):
            return grid.metric(name, int(value(node.index, grid, ranks)))
        case tree.Unary(op="not"):
            return ~as_bool(value(node.operand, grid, ranks))
        case tree.Unary():
            return -as_number(value(node.operand, grid, ranks))
        case tree.Conditional():
            chosen = as_bool(value(node.condition, grid, ranks))
            if chosen.ndim == 0:
                return value(node.then if chosen else node.otherwise, grid, ranks)
            return np.where(chosen, *(as_object(value(part, grid, ranks)) for part in (node.then, node.otherwise)))
        case tree.Call(function=function):
            parts = [as_object(value(argument, grid, ranks)) for argument in node.arguments]
            return abs(parts[0]) if function == "abs" else reduce(_CHOICES[function], parts)
        case tree.Binary(op=("and" | "or") as op):
            sides = [as_bool(value(side, grid, ranks)) for side in (node.left, node.right)]
            return np.logical_and(*sides) if op == "and" else np.logical_or(*sides)
        case tree.Binary(op=op):
            left, right = (as_number(value(side, grid, ranks)) for side in (node.left, node.right))
            return _BINARY[op](left, right)
    raise AssertionError(node)


def as_bool(column: Column) -> Any:
    return np.asarray(column != 0).astype(bool)


def as_number(column: Column) -> Column:
    """A truth counts as 0 or 1."""
    return column.astype(int).astype(object) if getattr(column, "dtype", None) == np.bool_ else column


def as_object(column: Column) -> Any:
    return np.asarray(as_number(column), object)


_CHOICES: Mapping[str, Any] = {"min": np.minimum, "max": np.maximum}
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": quotient,
    "//": operator.floordiv,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}


def names_in(node: tree.Expr | None) -> Iterator[tree.Name | tree.Index]:
    """Every name in an expression."""
    if isinstance(node, tree.Name | tree.Index):
        yield node
    for slot in () if node is None else node.__slots__:
        part = getattr(node, slot)
        for child in part if isinstance(part, tuple) else (part,):
            if isinstance(child, tree.Expr):
                yield from names_in(child)


def symbols_named(claim: tree.Claim) -> set[str]:
    names = (*names_in(claim.claim), *names_in(claim.condition))
    return {name.id for name in names if isinstance(name, tree.Name)} & set(SYMBOLS)


def rank_variables(claim: tree.Claim) -> list[str]:
    """The names that index a metric of the claim: each is any rank."""
    indices = [name.index for name in names_in(claim.claim) if isinstance(name, tree.Index)]
    return sorted({index.id for index in indices if isinstance(index, tree.Name)})
