"""Conditions on costs under which a time equals a form, decided at the fitted sizes, where all pieces are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import permutations
from math import gcd, lcm

import numpy as np

from schedc.exact.cone import Cone, Vector, dot
from schedc.exact.space import Space
from schedc.formulas.cost_domains import random_vectors
from schedc.formulas.fit import LinearForm, Names, Table, chosen_rows
from schedc.formulas.measure import MeasuredTimes
from schedc.formulas.pieces import Piece, coefficients, costs_of, inside_region
from schedc.formulas.regimes import Regime
from schedc.ir.arrays import Bools, Floats

_MOST_CONDITIONS = 7
_PENALTY = 0.1
"""Share that a condition on sizes and costs must exclude beyond one on costs alone to be preferred."""

_VECTORS = 150
_ROUNDS = 10
"""How often conditions are searched, each time with the costs at which the last ones failed."""

_EXACT = 1e-6
"""Relative tolerance of the search at random vectors. The conditions it gives are then decided exactly."""


def pieces_of(regime: Regime, rows: Sequence[MeasuredTimes], table: Table, names: Names) -> list[Piece]:
    """The forms of a regime with their conditions, decided at all its sizes. A form without conditions is left out."""
    chosen = inside_region(regime.region, table, names)
    part, columns = [rows[i] for i in chosen], chosen_rows(table, chosen)
    space = part[0].space
    samples = random_vectors(space, _VECTORS, seed=len(part))
    pieces = []
    for form in regime.forms:
        conditions: tuple[LinearForm, ...] | None
        if regime.complete:
            conditions = _against(form, _neighbours(form, regime.forms, part, columns), columns)
        else:
            others = _against(form, regime.forms, columns)
            conditions = _searched(form, list(dict.fromkeys([*_plain(space), *others])), part, columns, samples)
        if conditions is not None:
            pieces.append(Piece(form, regime.region, conditions))
    return pieces


def _against(form: LinearForm, others: Sequence[LinearForm], table: Table) -> tuple[LinearForm, ...]:
    """The conditions that no other form exceeds a form: each once, reduced."""
    conditions = (_reduced(form.minus(other), table) for other in others if other != form)
    return tuple(condition for condition in dict.fromkeys(conditions) if condition.terms)


def _neighbours(
    form: LinearForm, others: Sequence[LinearForm], rows: Sequence[MeasuredTimes], table: Table
) -> list[LinearForm]:
    """The forms whose pieces share a border with the form's piece at some size: only those bound it."""
    vectors = {other: [coefficients(other, table, row)[0] for row in range(len(rows))] for other in others}
    beside = [
        measured.epigraph.neighbours(vectors[form][row]) if vectors[form][row] in measured.pieces else set()
        for row, measured in enumerate(rows)
    ]
    return [other for other in others if any(vectors[other][row] in near for row, near in enumerate(beside))]


def _of_sizes(condition: LinearForm) -> bool:
    return any(monomial for monomial, _ in condition.terms)


def _plain(space: Space) -> Iterator[LinearForm]:
    """The conditions that one cost is at least another, for every two costs."""
    width = len(space.symbols)
    for more, less in permutations(range(width), 2):
        yield LinearForm((((), tuple(Fraction((i == more) - (i == less)) for i in range(width))),), width)


def _reduced(form: LinearForm, table: Table) -> LinearForm:
    """An equivalent condition in whole numbers, without a common factor in the sizes that is never negative.

    Where the factor is 0, the condition excludes nothing. The reduced condition then excludes more than it must.
    """
    if not form.terms:
        return form
    (_, first), *_ = form.terms
    pivot = next(i for i, f in enumerate(first) if f)
    factors = [(monomial, row[pivot] / first[pivot]) for monomial, row in form.terms]
    alike = all(row == tuple(f * x for x in first) for (_, row), (_, f) in zip(form.terms, factors, strict=True))
    if alike:
        common = LinearForm(tuple((m, (f,)) for m, f in factors)).at(table)
        if (common >= 0).all():
            form = LinearForm((((), first),), form.width)
        elif (common <= 0).all():
            form = LinearForm((((), tuple(-x for x in first)),), form.width)
    numbers = [x for _, row in form.terms for x in row if x]
    scale = Fraction(lcm(*(x.denominator for x in numbers)), gcd(*(x.numerator for x in numbers)))
    return LinearForm(tuple((m, tuple(x * scale for x in row)) for m, row in form.terms), form.width)


# Conditions where the other pieces are not known as formulas.


def _searched(
    form: LinearForm,
    candidates: Sequence[LinearForm],
    rows: Sequence[MeasuredTimes],
    table: Table,
    samples: Sequence[Vector],
) -> tuple[LinearForm, ...] | None:
    """A few conditions under which the time equals the form, at all sizes; None where the search finds none.

    Conditions are guessed from samples of the costs. Costs at which a guess fails join the samples.
    """
    points = [list(samples) for _ in rows]
    for _ in range(_ROUNDS):
        conditions = _separate(form, candidates, rows, table, points)
        if conditions is None:
            return None
        wrong = [(row, ray) for row, m in enumerate(rows) for ray in _wrong_rays(form, conditions, m, table, row)]
        if not wrong:
            return conditions
        for row, ray in wrong:
            points[row] += _around(ray, costs_of(conditions, rows[row].space, table, row))
    return None


def _wrong_rays(
    form: LinearForm, conditions: Sequence[LinearForm], measured: MeasuredTimes, table: Table, row: int
) -> list[Vector]:
    """Rays of the cone of the conditions at which the time differs from the form."""
    vector, scale = coefficients(form, table, row)
    cone = costs_of(conditions, measured.space, table, row)
    return [ray for ray in cone.rays if dot(vector, ray) != scale * measured.value(ray)]


def _around(ray: Vector, cone: Cone) -> list[Vector]:
    """The ray, and points of a cone near it."""
    return [ray, *(tuple(n * a + b for a, b in zip(ray, cone.interior, strict=True)) for n in (3, 30))]


def _separate(
    form: LinearForm,
    candidates: Sequence[LinearForm],
    rows: Sequence[MeasuredTimes],
    table: Table,
    points: Sequence[Sequence[Vector]],
) -> tuple[LinearForm, ...] | None:
    """A few conditions that keep many points at which a form is right and none at which it is wrong; None if none do.

    The search is greedy: the next condition excludes the most wrong points for the right ones that it costs. In the
    end conditions that the others make needless are dropped. Conditions on costs alone are preferred: one on sizes may
    hold at these sizes and exclude little at larger ones.
    """
    floats = (np.array([[float(x) for x in p] for p in listed]) for listed in points)
    vectors = [each / each.sum(axis=1, keepdims=True) for each in floats]
    right = np.concatenate([_right(form, m, table, row, vectors[row]) for row, m in enumerate(rows)])
    if not right.any():
        return None
    tests = [
        np.concatenate([_at(candidate, table, row, vectors[row]) >= -_EXACT for row in range(len(rows))])
        for candidate in candidates
    ]
    return _greedy(right, candidates, tests)


def _right(form: LinearForm, measured: MeasuredTimes, table: Table, row: int, vectors: Floats) -> Bools:
    values = (measured.matrix @ vectors.T).max(axis=0)
    return np.asarray(np.abs(_at(form, table, row, vectors) - values) <= _EXACT * (1 + np.abs(values)))


def _at(form: LinearForm, table: Table, row: int, vectors: Floats) -> Floats:
    """[vectors] the value of a form at one size."""
    return np.asarray(form.at(chosen_rows(table, [row]))[0] @ vectors.T)


def _greedy(right: Bools, candidates: Sequence[LinearForm], tests: Sequence[Bools]) -> tuple[LinearForm, ...] | None:
    chosen: list[int] = []
    kept = np.ones_like(right)
    while (wrong := kept & ~right).any():
        good = kept & right
        gains = [
            float((wrong & ~test).sum() / wrong.sum() - (good & ~test).sum() / max(1, good.sum()))
            - _PENALTY * _of_sizes(candidate)
            for test, candidate in zip(tests, candidates, strict=True)
        ]
        best = int(np.argmax(gains)) if gains else -1
        if best < 0 or not (wrong & ~tests[best]).any() or len(chosen) == _MOST_CONDITIONS:
            return None
        chosen.append(best)
        kept &= tests[best]
    for index in sorted(chosen, key=lambda i: not _of_sizes(candidates[i])):
        rest = [i for i in chosen if i != index]
        without = np.logical_and.reduce([tests[i] for i in rest]) if rest else np.ones_like(right)
        if not (without & ~right).any():
            chosen = rest
    return tuple(candidates[i] for i in chosen)
