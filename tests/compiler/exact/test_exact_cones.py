"""Extreme rays and faces of cones, against every subset of their half-spaces."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from schedc.exact.cone import Cone, Vector, dot, reduced
from support.sweeps import swept

CONES = swept(4000, 150)


@dataclass(frozen=True)
class Made:
    """A cone and the forms that cut it out of the orthant, each with whether it is 0 or at least 0."""

    cone: Cone
    cuts: tuple[tuple[Vector, bool], ...]

    @property
    def rows(self) -> list[Vector]:
        """All forms, those of the orthant first, in the order of the bits of `Cone.tight`."""
        return [*Cone.orthant(self.cone.dimension).rays, *(form for form, _ in self.cuts)]

    def holds(self, vector: Sequence[int]) -> bool:
        within = all(dot(form, vector) == 0 if equal else dot(form, vector) >= 0 for form, equal in self.cuts)
        return within and min(vector) >= 0


def cones(seed: int) -> Iterator[Made]:
    """Random cones of 2 to 6 coordinates: half-spaces as conditions on costs have them, some twice, and equalities."""
    for number in range(seed, seed + CONES):
        draw = random.Random(number)
        dimension = draw.randint(2, 6)
        cuts: list[tuple[Vector, bool]] = []
        for _ in range(draw.randint(0, 6)):
            largest = draw.choice((1, 1, 2, 5))
            form = [draw.randint(-largest, largest) for _ in range(dimension)]
            if draw.random() < 0.4:  # few costs, as in `W <= F`
                form = [c if draw.random() < 0.5 else 0 for c in form]
            again = cuts and draw.random() < 0.1
            cuts.append((tuple(3 * c for c in cuts[-1][0]) if again else tuple(form), draw.random() < 0.2))
        cone = Cone.orthant(dimension)
        for form, equal in cuts:
            cone = cone.cut(form, equal=equal)
        yield Made(cone, tuple(cuts))


def determinants(matrices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[n] determinants of [n, k, k] integers, along the first row."""
    size = matrices.shape[1]
    if size == 0:
        return np.ones(len(matrices), np.int64)
    columns = np.arange(size)
    minors = (determinants(matrices[:, 1:][:, :, columns != k]) for k in range(size))
    return sum(((-1) ** k * matrices[:, 0, k] * minor for k, minor in enumerate(minors)), np.zeros(len(matrices), int))


def rays_by_subsets(made: Made) -> set[Vector]:
    """The rays on which dimension - 1 independent forms are 0, of all that satisfy every form."""
    rows, dimension = np.array(made.rows, np.int64), made.cone.dimension
    chosen = rows[np.array(list(combinations(range(len(rows)), dimension - 1)))]
    columns = np.arange(dimension)
    minors = [(-1) ** k * determinants(chosen[:, :, columns != k]) for k in range(dimension)]
    lines = {reduced(line) for line in np.stack(minors, axis=1).tolist() if any(line)}
    return {ray for line in lines for ray in (line, tuple(-c for c in line)) if made.holds(ray)}


@pytest.mark.slow
@pytest.mark.sweep
def test_rays_are_those_that_subsets_of_half_spaces_give() -> None:
    degenerate = 0
    for made in cones(0):
        rays = rays_by_subsets(made)
        assert set(made.cone.rays) == rays, made.cuts
        assert len(made.cone.rays) == len(rays), made.cuts
        for ray, tight in zip(made.cone.rays, made.cone.tight, strict=True):
            assert tight == _tight(made, ray), made.cuts
        degenerate += len(rays) <= 1
    assert CONES / 20 < degenerate < CONES / 2


def _tight(made: Made, vector: Sequence[int]) -> int:
    return sum(1 << bit for bit, row in enumerate(made.rows) if dot(row, vector) == 0)


@pytest.mark.sweep
def test_every_point_is_inside_of_one_face() -> None:
    """The faces are those that subsets of half-spaces give; a random point lies in the relative interior of one."""
    most = 0
    for number, made in enumerate(cones(100_000)):
        if made.cone.dimension > 5:
            continue
        faces = {frozenset(face.rays): face for face in made.cone.faces()}
        assert len(faces) == len(made.cone.faces()), made.cuts
        on_row = [frozenset(ray for ray in made.cone.rays if dot(row, ray) == 0) for row in made.rows]
        smaller = {frozenset(made.cone.rays)}
        for rays in on_row:
            smaller |= {rays & face for face in smaller}
        assert set(faces) == smaller - {frozenset()}, made.cuts
        most = max(most, len(faces))
        draw = random.Random(number)
        for _ in range(5 * bool(made.cone.rays)):
            some = draw.sample(made.cone.rays, draw.randint(1, len(made.cone.rays)))
            weights = [draw.randint(1, 9) for _ in some]
            point = [dot(weights, column) for column in zip(*some, strict=True)]
            inside = [face for face in faces.values() if _tight(made, face.interior) == _tight(made, point)]
            assert len(inside) == 1, (made.cuts, point)
            assert set(some) <= set(inside[0].rays), (made.cuts, point)
    assert most > 20


def test_the_two_sides_of_a_border_cover_a_cone() -> None:
    for number, made in enumerate(cones(200_000)):
        draw = random.Random(number)
        border = tuple(draw.randint(-3, 3) for _ in range(made.cone.dimension))
        sides = [made.cone.cut(border), made.cone.cut(tuple(-c for c in border))]
        between = made.cone.cut(border, equal=True)
        assert set(between.rays) == set(sides[0].rays) & set(sides[1].rays)
        assert set(made.cone.rays) <= set(sides[0].rays) | set(sides[1].rays)
        if number > 100:
            break
