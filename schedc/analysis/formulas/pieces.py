"""Pieces of a time: linear forms in the costs that hold for all sizes under conditions, found and then verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from math import gcd, lcm

import numpy as np

from schedc.analysis.dependencies import Bools
from schedc.analysis.formulas.domains import Domain
from schedc.analysis.formulas.fit import Floats, Form, Monomial, Table, beyond, families, fit
from schedc.analysis.formulas.regions import NOWHERE, REGIONS, REMAINDERS, Region
from schedc.ir.schedule import Int64

MOST_PIECES, _MOST_CONDITIONS = 10, 7
_PENALTY = 0.1
"""What a condition on sizes and costs together must exclude more than one on costs alone, as a share."""

_LEAST_SHARE = 0.004
"""A piece that holds for fewer of the samples is not looked at."""
_EXACT = 1e-3
"""Less than any difference between two values: all are multiples of 1/24."""

_LEAST_ROWS = 8
"""Sizes that a region must have to be looked at."""

_Names = tuple[str, str, tuple[str, ...]]
"""The parameters: ranks, microbatches, others."""

LEAST_TESTED = 30
"""Samples at held-out sizes without which a formula counts as not verified."""


@dataclass(frozen=True, eq=False)
class Samples:
    """One time at n sizes under K cost vectors.

    table: [n] columns of sizes. vectors: [K, symbols]. values, even: [n, K].
    forms: [n, K, symbols] and exact: [n, K] (see `schedc.analysis.formulas.measure.Forms`).
    """

    table: Table
    vectors: Int64
    values: Floats
    even: Bools
    forms: Floats
    exact: Bools

    def rows(self, chosen: Bools) -> Samples:
        table = {name: column[chosen] for name, column in self.table.items()}
        values, even, forms, exact = self.values[chosen], self.even[chosen], self.forms[chosen], self.exact[chosen]
        return Samples(table, self.vectors, values, even, forms, exact)

    def agree(self, form: Form) -> Bools:
        """[n, K] where the form gives the value: exact, as values are integers and forms at most 24ths."""
        return np.abs(form.at(self.table) @ self.vectors.T - self.values) < _EXACT

    def satisfy(self, conditions: Sequence[Form]) -> Bools:
        """[n, K] where every condition is at least 0."""
        result = np.ones(self.values.shape, bool)
        for condition in conditions:
            result &= condition.at(self.table) @ self.vectors.T >= -_EXACT
        return result


@dataclass(frozen=True, eq=False)
class Piece:
    """``form`` . costs, at sizes of ``region`` and where every condition, itself a form, is at least 0.

    even: whether all ranks have this value, else it is the largest over the ranks. share: of the samples in the
    region that it holds for. tested: samples at held-out sizes at which it held.
    """

    form: Form
    region: Region
    conditions: tuple[Form, ...]
    even: bool
    share: float
    tested: int = 0


@dataclass(frozen=True)
class Failure:
    """Where a fitted formula was found wrong: it said one thing at a held-out size, the simulation another."""

    form: Form
    sizes: dict[str, int]
    costs: dict[str, int]
    said: float
    measured: float


@dataclass(frozen=True)
class Untried:
    """A fitted formula that held wherever it was tried, but at no size above those that it was fitted to.

    names: those sizes; most: the largest of each.
    """

    form: Form
    names: tuple[str, ...]
    most: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """One value that no piece speaks of."""

    sizes: dict[str, int]
    costs: dict[str, int]
    measured: float


def find_pieces(samples: Samples, more: Samples, many: Int64, domain: Domain, names: _Names) -> list[Piece]:
    """The pieces of the first region of sizes that they explain whole, else of that of which they explain most.

    more: samples at the same sizes, under other cost vectors and without forms, that conditions are learnt from.
    many: [K, symbols] cost vectors that are used instead where the value is the largest of the forms found, as it is
    when all ranks compute alike: then nothing needs to be simulated to know which form holds.
    """
    ranks, microbatches, _ = names
    chosen, forms = _best_region(samples, REGIONS, names)
    pieces = _pieces_of(forms, samples, more, many, chosen, names)
    if chosen.texts and not domain.latency:  # with latency the formulas of few microbatches fill pages
        inside = chosen.of(samples.table, ranks, microbatches)
        while rest := [r for r in REMAINDERS if not (inside & r.of(samples.table, ranks, microbatches)).any()]:
            other, forms = _best_region(samples, rest, names)
            if not forms:
                break
            inside |= other.of(samples.table, ranks, microbatches)
            pieces += _pieces_of(forms, samples, more, many, other, names)
    unique = {(piece.form, piece.conditions, piece.region.texts): piece for piece in pieces}
    return sorted(unique.values(), key=lambda p: (not _typical(p, domain, names), -p.share))[:MOST_PIECES]


def _typical(piece: Piece, domain: Domain, names: _Names) -> bool:
    """Whether it holds at typical costs on a few ranks with many microbatches."""
    ranks, microbatches, others = names
    size = {ranks: np.array([8]), microbatches: np.array([64]), **dict.fromkeys(others, np.array([2]))}
    inside = bool(piece.region.of(size, ranks, microbatches)[0])
    return inside and all((c.at(size) @ domain.typical.T >= 0).all() for c in piece.conditions)


def _best_region(samples: Samples, regions: Sequence[Region], names: _Names) -> tuple[Region, list[Form]]:
    """The first region in which every value is the largest of the forms found, with them.

    Else the first in which each value is that of some form, else that of which forms explain most.
    """
    best: tuple[float, Region, list[Form]] = (0.0, NOWHERE, [])
    monomials = list(families(*names))
    for region in regions:
        chosen = region.of(samples.table, *names[:2])
        if chosen.sum() < _LEAST_ROWS or (best[1] is not NOWHERE and region.texts and chosen.all()):
            continue
        part = samples.rows(chosen)
        forms = _forms(part, monomials)
        explained = _explained(part, forms)
        largest = explained == 1.0 and _is_largest(part, forms)
        if largest or (explained == 1.0 > best[0]) or explained > best[0] + 0.02:
            best = (explained, region, forms)
        if largest:
            break
    return best[1:]


def _pieces_of(
    forms: list[Form], samples: Samples, more: Samples, many: Int64, region: Region, names: _Names
) -> list[Piece]:
    if not forms:
        return []
    measured = more.rows(region.of(samples.table, *names[:2]))
    part = measured
    if _is_largest(part, forms):
        part = replace(part, vectors=many)
        part = replace(part, values=_largest(part, forms))
    pieces = (_piece(form, forms, part, measured, region) for form in forms)
    return [_widened(piece, more, names) for piece in pieces if piece is not None]


def _widened(piece: Piece, samples: Samples, names: _Names) -> Piece:
    """The piece in the widest region in which it is right wherever its conditions hold."""
    wrong = (samples.satisfy(piece.conditions) & ~samples.agree(piece.form)).any(axis=1)
    own = piece.region.of(samples.table, *names[:2])
    for region in REGIONS:
        rows = region.of(samples.table, *names[:2])
        if not (own & ~rows).any() and not (wrong & rows).any():
            held = samples.rows(rows).satisfy(piece.conditions)
            even = bool(samples.even[rows][held].all())
            return replace(piece, region=region, even=even, share=float(held.mean()))
    return piece


def _forms(samples: Samples, families: list[list[Monomial]]) -> list[Form]:
    """The forms that some cost vector has at every size."""
    usable = np.flatnonzero(samples.exact.all(axis=0))
    if not usable.size:
        return []
    sequences = np.unique(samples.forms[:, usable].transpose(1, 0, 2), axis=0).transpose(1, 0, 2)
    found: list[Form] = []
    for monomials in families:
        fitted = fit(sequences, samples.table, monomials)
        found += [form for form in fitted if form is not None]
        sequences = sequences[:, [form is None for form in fitted]]
        if not sequences.shape[1]:
            break
    return found


def _explained(samples: Samples, forms: list[Form]) -> float:
    """The share of samples that some form gives."""
    right = np.zeros(samples.values.shape, bool)
    for form in forms:
        right |= samples.agree(form)
    return float(right.mean())


# Conditions.


def _is_largest(samples: Samples, forms: list[Form]) -> bool:
    """Whether every value is the largest of the forms."""
    return bool((np.abs(_largest(samples, forms) - samples.values) < _EXACT).all())


def _largest(samples: Samples, forms: list[Form]) -> Floats:
    """[n, K] the largest of the forms."""
    return np.max([form.at(samples.table) @ samples.vectors.T for form in forms], axis=0)  # type: ignore[no-any-return]


def _piece(form: Form, forms: list[Form], samples: Samples, measured: Samples, region: Region) -> Piece | None:
    right = samples.agree(form)
    if right.mean() < _LEAST_SHARE:
        return None
    candidates = [
        *_plain(samples.vectors.shape[1]),
        *(_reduced(form.minus(o), samples.table) for o in forms if o != form),
    ]
    conditions = _separate(right, [c for c in dict.fromkeys(candidates) if c.terms], samples)
    if conditions is None:
        return None
    held = measured.satisfy(conditions)
    return Piece(form, region, conditions, bool(measured.even[held].all()), float(held.mean()))


def _plain(symbols: int) -> Iterator[Form]:
    """One cost at least another."""
    for more, less in permutations(range(symbols), 2):
        yield Form((((), tuple(Fraction((i == more) - (i == less)) for i in range(symbols))),))


def _reduced(form: Form, table: Table) -> Form:
    """The same condition without a common factor that depends on sizes only and is positive, and in whole numbers."""
    if not form.terms:
        return form
    (_, first), *_ = form.terms
    pivot = next(i for i, f in enumerate(first) if f)
    factors = [(monomial, row[pivot] / first[pivot]) for monomial, row in form.terms]
    alike = all(row == tuple(f * x for x in first) for (_, row), (_, f) in zip(form.terms, factors, strict=True))
    if alike:
        common = Form(tuple((m, (f,)) for m, f in factors)).at(table)
        if (common >= 0).all():
            form = Form((((), first),))
        elif (common <= 0).all():
            form = Form((((), tuple(-x for x in first)),))
    numbers = [x for _, row in form.terms for x in row if x]
    scale = Fraction(lcm(*(x.denominator for x in numbers)), gcd(*(x.numerator for x in numbers)))
    return Form(tuple((m, tuple(x * scale for x in row)) for m, row in form.terms))


def _separate(right: Bools, candidates: list[Form], samples: Samples) -> tuple[Form, ...] | None:
    """A few conditions that keep many samples at which a form is right and none at which it is wrong; None if none do.

    One at a time the condition that excludes the most wrong samples for the right ones that it costs; in the end
    those that the others make needless are dropped. Conditions between costs alone are preferred: what depends on
    sizes too may hold at the sizes of the samples and say little at larger ones.
    """
    tests = [samples.satisfy([candidate]) for candidate in candidates]
    of_sizes = [any(monomial for monomial, _ in candidate.terms) for candidate in candidates]
    chosen: list[int] = []
    kept = np.ones_like(right)
    while (wrong := kept & ~right).any():
        good = kept & right
        gains = [
            float((wrong & ~test).sum() / wrong.sum() - (good & ~test).sum() / max(1, good.sum())) - _PENALTY * mixed
            for test, mixed in zip(tests, of_sizes, strict=True)
        ]
        best = int(np.argmax(gains)) if gains else -1
        if best < 0 or not (wrong & ~tests[best]).any() or len(chosen) == _MOST_CONDITIONS:
            return None
        chosen.append(best)
        kept &= tests[best]
    for index in sorted(chosen, key=lambda i: not of_sizes[i]):
        rest = [i for i in chosen if i != index]
        without = np.logical_and.reduce([tests[i] for i in rest]) if rest else np.ones_like(right)
        if not (without & ~right).any():
            chosen = rest
    return tuple(candidates[i] for i in chosen)


# Verification.


def verify_piece(
    piece: Piece, samples: Samples, domain: Domain, ranks: str, microbatches: str, fitted: Table | None = None
) -> Piece | Failure | Untried | None:
    """The piece with the number of samples at held-out sizes that it was right at, or the first at which it was wrong.

    None where too few samples at held-out sizes satisfy its conditions; `Untried` where it depends on ranks or
    microbatches, and none of those samples has more of them than the sizes of ``fitted`` that it was fitted to.
    """
    samples = samples.rows(piece.region.of(samples.table, ranks, microbatches))
    held = samples.satisfy(piece.conditions)
    wrong = np.argwhere(held & ~samples.agree(piece.form))
    if len(wrong):
        row, column = (int(i) for i in wrong[0])
        vector = samples.vectors[column]
        return Failure(
            piece.form,
            {name: int(values[row]) for name, values in samples.table.items()},
            dict(zip(domain.symbols, vector.tolist(), strict=True)),
            float(piece.form.at({n: v[row : row + 1] for n, v in samples.table.items()})[0] @ vector),
            float(samples.values[row, column]),
        )
    tested = int(held.sum())
    if tested < LEAST_TESTED:
        return None
    if fitted is not None:
        there = {name: values[held.any(axis=1)] for name, values in samples.table.items()}
        inside = piece.region.of(fitted, ranks, microbatches)
        most = {name: int(fitted[name][inside].max()) for name in (ranks, microbatches)}
        if piece.region.bounds(most[ranks]):
            del most[ranks]
        if names := beyond((piece.form,), there, most):
            return Untried(piece.form, names, tuple(most[name] for name in names))
    even = piece.even and bool(samples.even[held].all())
    return replace(piece, even=even, tested=tested)


def coverage(pieces: Sequence[Piece], samples: Samples, ranks: str, microbatches: str) -> float:
    """The share of samples at which the conditions of some piece hold."""
    return float(_covered(pieces, samples, ranks, microbatches).mean())


def _covered(pieces: Sequence[Piece], samples: Samples, ranks: str, microbatches: str) -> Bools:
    covered = np.zeros(samples.values.shape, bool)
    for piece in pieces:
        covered |= samples.satisfy(piece.conditions) & piece.region.of(samples.table, ranks, microbatches)[:, None]
    return covered


def left_out(
    pieces: Sequence[Piece], samples: Samples, domain: Domain, ranks: str, microbatches: str
) -> Example | None:
    """A sample that no piece speaks of, at the smallest size that has one."""
    open_ = ~_covered(pieces, samples, ranks, microbatches)
    order = np.lexsort([samples.table[microbatches], samples.table[ranks]])
    rows = [int(row) for row in order if open_[row].any()]
    if not rows:
        return None
    row, column = rows[0], int(np.argmax(open_[rows[0]]))
    return Example(
        {name: int(values[row]) for name, values in samples.table.items()},
        dict(zip(domain.symbols, samples.vectors[column].tolist(), strict=True)),
        float(samples.values[row, column]),
    )
