"""Decides a statement on a cone of costs: true everywhere in it, or false at a vector that is given.

A cone means its relative interior. A time has the form of a critical path at a point inside, and is nowhere less than
that path. A time is convex, so it is nowhere more than the mean of its values at the rays. Most statements follow from
these two bounds. f <= L is true if it holds at every ray. f >= L is true if a path is at least L at every ray, and f ==
L if both are. What is still open is split where two critical paths, or the two sides of a comparison, are equally long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedc.exact.cone import Cone, Vector, dot, minus
from schedc.exact.statement import SIGNS, Comparison, Statement, closed, comparisons, quantities, true_at, truth
from schedc.exact.times import LinearTimes, Quantity

MOST_CONES = 4000
MOST_CELLS = 1_000_000_000
"""What a decision may take: cones, and simulated cells of the schedule, over all cost vectors."""


class TooMany(Exception):
    """The statement is not decided with `MOST_CONES` cones and `MOST_CELLS` simulated cells."""


@dataclass(frozen=True)
class Refuted:
    """A vector at which the statement is false, in the relative interior of a ``cone``."""

    vector: Vector
    cone: Cone


@dataclass(frozen=True)
class _Bounds:
    """Bounds of a comparison's value on a cone, at each of its rays; at a mean of rays, their means are bounds.

    exact: the linear form that the value is where both bounds are the same at every ray; else None.
    """

    least: tuple[int, ...]
    most: tuple[int, ...]
    exact: Vector | None


def decide(statement: Statement, cone: Cone, times: LinearTimes) -> Refuted | None:
    """Where the statement is false in the relative interior of the cone; None if nowhere.

    A `closed` statement then holds on the cone's closure, too. Raises `TooMany`.
    """
    if isinstance(statement, bool):
        return None if statement else Refuted(cone.interior, cone)
    limit = closed(statement)
    waiting, seen = [cone], 0
    while waiting:
        part = waiting.pop()
        seen += 1
        if seen > MOST_CONES or times.simulations.cells > MOST_CELLS:
            raise TooMany
        point = part.interior
        there = {q: times.values(q, [point])[0] for q in quantities(statement)}
        if not true_at(statement, point, there):
            return Refuted(point, part)
        view = _View(part, times, point)
        bounds = {c: view.bounds(c) for c in comparisons(statement)}
        decided = {c: _compared(c.op, b) for c, b in bounds.items()}
        if truth(statement, decided.__getitem__):
            continue
        border = view.border(next(c for c, holding in decided.items() if holding is None), bounds)
        waiting += _split(part, border, limit)
    return None


def _split(cone: Cone, border: Vector, limit: bool) -> list[Cone]:
    """The two sides of a border, and the border itself where a limit is no proof."""
    sides = [cone.cut(border), cone.cut(tuple(-c for c in border))]
    return sides if limit else [*sides, cone.cut(border, equal=True)]


class _View:
    """A cone with the forms that times have at a point inside, each worked out when it is asked for."""

    def __init__(self, cone: Cone, times: LinearTimes, point: Vector) -> None:
        self.cone, self.times, self.point = cone, times, point
        self.forms: dict[Quantity, Vector] = {}
        self.values: dict[Quantity, list[int]] = {}

    def form(self, quantity: Quantity) -> Vector:
        if quantity not in self.forms:
            self.forms[quantity] = self.times.form(quantity, self.point)
        return self.forms[quantity]

    def at_rays(self, quantity: Quantity) -> list[int]:
        if quantity not in self.values:
            self.values[quantity] = self.times.values(quantity, self.cone.rays)
        return self.values[quantity]

    def bounds(self, comparison: Comparison) -> _Bounds:
        rays = self.cone.rays
        least = [dot(comparison.form, ray) for ray in rays]
        most = list(least)
        for quantity, count in comparison.times:
            form, values = self.form(quantity), self.at_rays(quantity)
            low, high = (least, most) if count > 0 else (most, least)
            for i, ray in enumerate(rays):
                low[i] += count * dot(form, ray)
                high[i] += count * values[i]
        exact = None
        if least == most:
            total = list(comparison.form)
            for quantity, count in comparison.times:
                total = [t + count * c for t, c in zip(total, self.form(quantity), strict=True)]
            exact = tuple(total)
        return _Bounds(tuple(least), tuple(most), exact)

    def border(self, comparison: Comparison, bounds: Mapping[Comparison, _Bounds]) -> Vector:
        """The form of a border that splits what a comparison leaves open."""
        exact = bounds[comparison].exact
        if exact is not None:
            return exact
        for quantity, _ in comparison.times:
            form = self.form(quantity)
            for ray, value in zip(self.cone.rays, self.at_rays(quantity), strict=True):
                if value > dot(form, ray):
                    return minus(form, self.times.form(quantity, ray))
        raise AssertionError("bounds that differ have a time whose bounds differ")


def _compared(op: str, bounds: _Bounds) -> bool | None:
    """Whether the comparison holds at every point inside of the cone, or at none; None where that is open."""
    signs = {-1, 0, 1}
    if max(bounds.most) <= 0:
        signs -= {1} if min(bounds.most) == 0 else {0, 1}
    if min(bounds.least) >= 0:
        signs -= {-1} if max(bounds.least) == 0 else {-1, 0}
    holding = signs & SIGNS[op]
    return None if holding and holding != signs else bool(holding)
