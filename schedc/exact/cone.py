"""Polyhedral cones of nonnegative integer vectors: extreme rays, kept exact while half-spaces cut the cone.

The double description method (Motzkin, Raiffa, Thompson, Thrall 1953; Fukuda, Prodon 1996) over Python's integers. All
cones here lie in the nonnegative orthant, so they are pointed and need no lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from operator import mul

Vector = tuple[int, ...]
"""A ray, a point, or the coefficients of a linear form: one integer per coordinate."""


def dot(form: Sequence[int], vector: Sequence[int]) -> int:
    return sum(map(mul, form, vector))


def minus(first: Sequence[int], second: Sequence[int]) -> Vector:
    return tuple(a - b for a, b in zip(first, second, strict=True))


def reduced(vector: Sequence[int]) -> Vector:
    """The vector without a common factor."""
    factor = gcd(*vector)
    return tuple(vector) if factor <= 1 else tuple(v // factor for v in vector)


@dataclass(frozen=True)
class Cone:
    """The cone of all nonnegative combinations of its extreme rays.

    dimension: number of coordinates. rays: [rays] each once, without a common factor.
    tight: [rays] bits, one per half-space that made the cone, set where the ray lies on its border.
    rows: number of those half-spaces.
    """

    dimension: int
    rays: tuple[Vector, ...]
    tight: tuple[int, ...]
    rows: int

    @classmethod
    def orthant(cls, dimension: int) -> Cone:
        """All nonnegative vectors."""
        everything = (1 << dimension) - 1
        units = tuple(tuple(int(i == j) for j in range(dimension)) for i in range(dimension))
        return cls(dimension, units, tuple(everything & ~(1 << i) for i in range(dimension)), dimension)

    @property
    def interior(self) -> Vector:
        """A point of the relative interior: the sum of the rays, without a common factor."""
        return reduced([sum(column) for column in zip(*self.rays, strict=True)])

    def cut(self, form: Sequence[int], *, equal: bool = False) -> Cone:
        """The part of the cone where ``form`` . x >= 0; with ``equal`` where it is 0."""
        values = [dot(form, ray) for ray in self.rays]
        bit = 1 << self.rows
        kept = [
            (ray, tight | (0 if value else bit))
            for ray, tight, value in zip(self.rays, self.tight, values, strict=True)
            if value == 0 or (value > 0 and not equal)
        ]
        above = [i for i, value in enumerate(values) if value > 0]
        below = [i for i, value in enumerate(values) if value < 0]
        for i in above:
            for j in below:
                common = self.tight[i] & self.tight[j]
                if self._adjacent(i, j, common):
                    high, low = values[i], -values[j]
                    ray = reduced([low * a + high * b for a, b in zip(self.rays[i], self.rays[j], strict=True)])
                    kept.append((ray, common | bit))
        return Cone(self.dimension, tuple(r for r, _ in kept), tuple(t for _, t in kept), self.rows + 1)

    def _adjacent(self, i: int, j: int, common: int) -> bool:
        """Whether rays i and j span an edge: no third ray lies on every border that they share."""
        return not any(common & tight == common for k, tight in enumerate(self.tight) if k not in (i, j))

    def cut_all(self, forms: Iterable[Sequence[int]]) -> Cone:
        cone = self
        for form in forms:
            cone = cone.cut(form)
        return cone

    def faces(self) -> list[Cone]:
        """The cone and all its faces but {0}. Their relative interiors are disjoint and cover the cone without {0}."""
        faces: dict[frozenset[int], None] = {}
        waiting = [frozenset(range(len(self.rays)))]
        while waiting:
            face = waiting.pop()
            if not face or face in faces:
                continue
            faces[face] = None
            for row in range(self.rows):
                smaller = frozenset(i for i in face if self.tight[i] >> row & 1)
                if smaller != face:
                    waiting.append(smaller)
        return [self._of(sorted(face)) for face in faces]

    def _of(self, chosen: list[int]) -> Cone:
        """The face that some of the rays span."""
        rays, tight = tuple(self.rays[i] for i in chosen), tuple(self.tight[i] for i in chosen)
        return Cone(self.dimension, rays, tight, self.rows)
