"""All linear pieces of a time at one size, and the share of the costs at which the time equals each.

The points (x, z) with z at least the time at x are a cone, and its facets are the pieces. It is cut out by the forms of
critical paths: as long as the time at a ray exceeds z there, the path at that ray cuts the ray off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod

from schedc.exact.cone import Cone, Vector, dot
from schedc.exact.times import LinearTimes, Quantity

_NEAR = 1_000_000
"""Weight of a ray against the interior point, in a vector near the ray."""


@dataclass(frozen=True, eq=False)
class Epigraph:
    """The cone of all (x, z), x in a cone of costs, with z at least each of some linear forms.

    cone: in [coordinates + 1] dimensions. forms: the forms that cut the cone, by the row of the cone that each made.
    """

    cone: Cone
    forms: dict[int, Vector]

    @classmethod
    def over(cls, costs: Cone, bounds: Sequence[Sequence[int]], forms: Sequence[Vector]) -> Epigraph:
        """The epigraph of the largest of ``forms`` over the costs that satisfy ``bounds`` . x >= 0, which is ``costs``.

        A negative form is taken for 0.
        """
        dimension = costs.dimension
        cone = Cone.orthant(dimension + 1)
        for bound in bounds:
            cone = cone.cut((*bound, 0))
        return cls(cone, {}).above(forms)

    def above(self, forms: Sequence[Vector]) -> Epigraph:
        cone, forms_by_row = self.cone, dict(self.forms)
        for form in forms:
            forms_by_row[cone.rows] = form
            cone = cone.cut((*(-c for c in form), 1))
        return Epigraph(cone, forms_by_row)

    @cached_property
    def points(self) -> tuple[Vector, ...]:
        """[points] the x of all rays except the vertical one."""
        return tuple(ray[:-1] for ray in self.cone.rays if any(ray[:-1]))

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """[points] the z of `points`."""
        return tuple(ray[-1] for ray in self.cone.rays if any(ray[:-1]))

    def region(self, row: int) -> Cone | None:
        """The costs at which the form of a row is the largest; None if these are only a border between other forms."""
        chosen = [i for i, tight in enumerate(self.cone.tight) if tight >> row & 1 and any(self.cone.rays[i][:-1])]
        rays = tuple(self.cone.rays[i][:-1] for i in chosen)
        full = _rank(rays) == _rank(self.points)
        tight = tuple(self.cone.tight[i] for i in chosen)
        return Cone(self.cone.dimension - 1, rays, tight, self.cone.rows) if full else None

    def neighbours(self, form: Vector) -> set[Vector]:
        """The pieces that share a border with a piece. The border has one dimension less than the costs."""
        full = _rank(self.points)
        mine = self._tight(form)
        shared_points = {
            other: [x for x, height in mine if dot(other, x) == height] for other in self.regions if other != form
        }
        return {
            other for other, shared in shared_points.items() if len(shared) >= full - 1 and _rank(shared) == full - 1
        }

    def _tight(self, form: Vector) -> list[tuple[Vector, int]]:
        return [(x, z) for x, z in zip(self.points, self.heights, strict=True) if dot(form, x) == z]

    @cached_property
    def regions(self) -> dict[Vector, Cone]:
        """The pieces, each with the costs at which it is the largest."""
        regions = ((form, self.region(row)) for row, form in self.forms.items())
        return {form: region for form, region in regions if region is not None}


def linear_pieces(
    times: LinearTimes, quantity: Quantity, costs: Cone, bounds: Sequence[Sequence[int]], most: int
) -> Epigraph | None:
    """The epigraph of a time: its `Epigraph.regions` are all linear pieces. None where there are more than ``most``.

    costs: the cone that ``bounds`` make, on which the time is convex.
    """
    inside = costs.interior
    epigraph = Epigraph.over(costs, bounds, [times.form(quantity, inside)])
    checked: set[Vector] = set()
    while True:
        fresh = [(x, z) for x, z in zip(epigraph.points, epigraph.heights, strict=True) if x not in checked]
        values = times.values(quantity, [x for x, _ in fresh])
        missed = [x for (x, z), value in zip(fresh, values, strict=True) if value > z]
        if not missed:
            return epigraph if len(epigraph.regions) <= most else None
        checked |= {x for (x, z), value in zip(fresh, values, strict=True) if value == z}
        present = set(epigraph.forms.values())
        added: dict[Vector, None] = {}
        for x in missed[:_AT_ONCE]:
            near = tuple(_NEAR * a + b for a, b in zip(x, inside, strict=True))
            form = times.form(quantity, near)
            if dot(form, x) < times.values(quantity, [x])[0]:  # two pieces meet at the ray, not at the near point
                form = times.form(quantity, x)
            if form not in present:
                added[form] = None
        epigraph = epigraph.above(list(added))
        if len(epigraph.forms) > 3 * most:
            return None


_AT_ONCE = 6
"""Paths added before the rays are checked again."""


def _eliminated(rows: Sequence[Vector]) -> tuple[int, int]:
    """The rank of integer vectors, and for a square of them the determinant; by Bareiss, all divisions are exact."""
    left, sign, before, rank = [list(row) for row in rows], 1, 1, 0
    width = len(left[0]) if left else 0
    for column in range(width):
        pivot = next((i for i in range(rank, len(left)) if left[i][column]), None)
        if pivot is None:
            continue
        if pivot != rank:
            left[rank], left[pivot], sign = left[pivot], left[rank], -sign
        top = left[rank]
        for i in range(rank + 1, len(left)):
            factor = left[i][column]
            left[i] = [(top[column] * a - factor * b) // before for a, b in zip(left[i], top, strict=True)]
        before, rank = top[column], rank + 1
    return rank, sign * before if rank == width else 0


def _rank(rows: Sequence[Vector]) -> int:
    return _eliminated(rows)[0]


@lru_cache(maxsize=4096)
def volume(cone: Cone) -> Fraction:
    """Volume of the cone's points whose coordinates sum to 1, times a constant of the dimension; 0 for a flat cone."""
    borders = [sum(1 << i for i, tight in enumerate(cone.tight) if tight >> row & 1) for row in range(cone.rows)]
    return _volume(cone, [border for border in borders if border], (1 << len(cone.rays)) - 1, ())


def _volume(cone: Cone, borders: Sequence[int], face: int, apexes: tuple[int, ...]) -> Fraction:
    """Volume of a face of the cone joined with apexes, by a triangulation that pulls one ray after the other.

    face, borders: the rays of the face and of each half-space's border, as bits.
    """
    first = (face & -face).bit_length() - 1
    if face == 1 << first:
        return _simplex([cone.rays[i] for i in (*apexes, first)]) if len(apexes) == cone.dimension - 1 else Fraction(0)
    if len(apexes) >= cone.dimension - 1:
        return Fraction(0)
    facets = {face & border for border in borders if not border >> first & 1} - {0}
    largest = [f for f in facets if not any(f & other == f != other for other in facets)]
    return sum((_volume(cone, borders, facet, (*apexes, first)) for facet in largest), Fraction(0))


def _simplex(rays: Sequence[Vector]) -> Fraction:
    return Fraction(abs(_eliminated(rays)[1]), prod(map(sum, rays)))
