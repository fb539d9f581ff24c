"""The costs that a statement covers: free symbols, the costs that follow from them, and the bounds that all satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from schedc.exact.cone import Cone, Vector, minus
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import has_recomputation
from schedc.step.costs.keys import COST_SYMBOLS, ZERO_SYMBOLS
from schedc.step.dependencies import Dependencies

ONE = "1"
"""The last coordinate where a statement has constants: the unit in which constants and costs are counted."""


@dataclass(frozen=True)
class Bound:
    """The condition ``form`` . x >= 0, or > 0 if ``strict``. text: how it is printed."""

    form: Vector
    strict: bool
    text: str


@dataclass(frozen=True)
class Space:
    """Costs, the same for every stage, as vectors of integers: one coordinate per free symbol.

    symbols: the free costs, in the order of `COST_SYMBOLS`.
    split: whether B is I + W, as it is where the order has an I; else B is a symbol of its own.
    constant: whether there is a last coordinate `ONE`.
    narrowed: further bounds that all vectors satisfy.
    equal: whether F, I and W are one cost, called F.

    Every cost is greater than 0, but those of `ZERO_SYMBOLS` at least 0, and FB between max(F, B) and F + B.
    """

    symbols: tuple[str, ...]
    split: bool
    constant: bool = False
    narrowed: tuple[Bound, ...] = ()
    equal: bool = False

    @classmethod
    def of(cls, dependencies: Dependencies, named: Sequence[str] | frozenset[str] | set[str] = ()) -> Space:
        """The space of a schedule's costs, and of those that a statement names besides."""
        schedule = dependencies.schedule
        split = bool((schedule.kind == OpKind.I).any())
        used = {"F", *(("I", "W") if split else ("B",)), *named}
        if bool(dependencies.with_backward.any()):
            used.add("FB")
        if has_recomputation(schedule):
            used.add("R")
        if split:
            used.discard("B")
        return cls(tuple(symbol for symbol in COST_SYMBOLS if symbol in used), split)

    @property
    def dimension(self) -> int:
        return len(self.symbols) + self.constant

    @cached_property
    def coordinates(self) -> tuple[str, ...]:
        return (*self.symbols, ONE) if self.constant else self.symbols

    def form(self, cost: str) -> Vector:
        """[coordinates] coefficients of a cost, or of `ONE`; all 0 for what is 0 outside of the space, as a latency."""
        if cost not in self._forms:
            parts = ("I", "W") if cost == "B" and self.split else (cost,)
            named = ["F" if self.equal and part in ("I", "W") else part for part in parts]
            self._forms[cost] = tuple(named.count(name) for name in self.coordinates)
        return self._forms[cost]

    @cached_property
    def _forms(self) -> dict[str, Vector]:
        return {}

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """The bounds that every vector satisfies."""
        bounds = [
            Bound(self.form(s), s not in ZERO_SYMBOLS, f"{s} {'>=' if s in ZERO_SYMBOLS else '>'} 0")
            for s in self.symbols
        ]
        if self.constant:
            bounds.append(Bound(self.form(ONE), True, ""))
        if "FB" in self.symbols:
            F, B, FB = self.form("F"), self.form("B"), self.form("FB")
            backward = "I + W" if self.split else "B"
            bounds += [
                Bound(minus(FB, F), False, "FB >= F"),
                Bound(minus(FB, B), False, f"FB >= {backward}"),
                Bound(tuple(a + b - c for a, b, c in zip(F, B, FB, strict=True)), False, f"FB <= F + {backward}"),
            ]
        return (*bounds, *self.narrowed)

    @cached_property
    def cone(self) -> Cone:
        """The closure of all vectors of the space."""
        return Cone.orthant(self.dimension).cut_all(bound.form for bound in self.bounds[self.dimension :])

    @property
    def texts(self) -> tuple[str, ...]:
        """The bounds and ties of the space as comparisons, to be printed."""
        tied = (*(("F == I", "I == W") if self.equal else ()), *(("B == I + W",) if self.split else ()))
        still = (f"{s} == 0" for s in COST_SYMBOLS if s in ZERO_SYMBOLS and s not in self.symbols)
        return (*(bound.text for bound in self.bounds if bound.text), *tied, *still)

    def costs(self, vector: Sequence[int]) -> dict[str, float]:
        """The free costs of a vector, in units of the last coordinate where that is `ONE`."""
        unit = vector[-1] if self.constant else 1
        costs = vector[: len(self.symbols)]
        return {s: (c // unit if c % unit == 0 else c / unit) for s, c in zip(self.symbols, costs, strict=True)}
