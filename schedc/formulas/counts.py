"""Formulas of counts: quasi-polynomials in sizes and rank, for all ranks or parts of them, or a min or max of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.formulas.fit import LinearForm, Monomial, Names, Table, chosen_rows, families, fit
from schedc.formulas.pieces import Example, FailedPiece, Untried, sizes_at, untried
from schedc.formulas.regions import REGIONS, REMAINDERS, SizeRegion
from schedc.ir.arrays import Bools, Floats, Int64

RANK = "r"

_Combine = Callable[[Floats, Floats], Floats]
COMBINE: dict[str, _Combine] = {"min": np.minimum, "max": np.maximum}

_LEAST_ROWS = 10


@dataclass(frozen=True, eq=False)
class RankPart:
    """Ranks that share a formula.

    text: the condition on ``r``; empty for all ranks.
    holds: [n] whether the condition holds, from [n] ranks and [n] numbers of ranks.
    """

    text: str
    holds: Callable[[Int64, Int64], Bools]


SPLITS: tuple[tuple[RankPart, ...], ...] = (
    (RankPart("", lambda r, P: r >= 0),),
    (
        RankPart("r == 0", lambda r, P: r == 0),
        RankPart("0 < r and r < {P} - 1", lambda r, P: (r > 0) & (r < P - 1)),
        RankPart("r == {P} - 1", lambda r, P: (r == P - 1) & (r > 0)),
    ),
    (
        RankPart("r == {P}//2 - 1 or r == {P}//2", lambda r, P: (r == P // 2 - 1) | (r == P // 2)),
        RankPart("r < {P}//2 - 1 or r > {P}//2", lambda r, P: (r < P // 2 - 1) | (r > P // 2)),
    ),
    (
        RankPart("r < {P}//2", lambda r, P: r < P // 2),
        RankPart("r >= {P}//2", lambda r, P: r >= P // 2),
    ),
)


@dataclass(frozen=True, eq=False)
class CountPiece:
    """The count on the ranks of ``part`` at sizes of ``region``. part: None for a count of the whole schedule.

    forms: a form, or two forms that ``combine`` (min, max) joins. tested: number of held-out values that hold.
    """

    part: RankPart | None
    region: SizeRegion
    forms: tuple[LinearForm, ...]
    combine: str = ""
    tested: int = 0

    def at(self, table: Table) -> Floats:
        """[n] the count at every row."""
        values = [form.at(table)[:, 0] for form in self.forms]
        return COMBINE[self.combine](*values) if self.combine else values[0]

    def applies(self, table: Table, names: Names) -> Bools:
        """[n] whether the piece covers each row."""
        inside = self.region.of(table, names)
        return inside if self.part is None else inside & self.part.holds(table[RANK], table[names[0]])


def find_counts(targets: Int64, table: Table, names: Names) -> list[CountPiece]:
    """Pieces that give every target at all sizes, or else in the first region of sizes that has such pieces.

    For sizes outside that region a second region is tried. No region: no pieces.
    targets: [n] counts. table: [n] columns, with `RANK` where each row is a rank.
    """
    monomials = list(families(names, RANK if RANK in table else None))

    def in_region(region: SizeRegion) -> list[CountPiece]:
        for split in SPLITS if RANK in table else ((None,),):
            pieces = []
            for part in split:
                rows = CountPiece(part, region, ()).applies(table, names)
                formula = _single(targets[rows], chosen_rows(table, rows), monomials, names)
                if formula is None:
                    break
                pieces.append(CountPiece(part, region, *formula))
            if len(pieces) == len(split):
                return pieces
        return []

    for region in REGIONS:
        if pieces := in_region(region):
            if not region.texts:
                return pieces
            inside = region.of(table, names)
            rest = [r for r in REMAINDERS if not (inside & r.of(table, names)).any()]
            return pieces + next((more for r in rest if (more := in_region(r))), [])
    return []


def _single(
    targets: Int64, table: Table, monomials: list[list[Monomial]], names: Names
) -> tuple[tuple[LinearForm, ...], str] | None:
    """(forms, combine): one form, or one fitted where microbatches are ample and one fitted where the first fails."""
    if targets.size < _LEAST_ROWS:
        return None
    plain = monomials[:2]
    for family in plain:
        if (form := _fit(targets, table, family)) is not None:
            return (form,), ""
    for family in (*plain, *monomials[3:4]):
        if (two := _two(targets, table, family, names)) is not None:
            return two
    for family in monomials[2:]:
        if (form := _fit(targets, table, family)) is not None:
            return (form,), ""
    return None


def _fit(targets: Int64, table: Table, family: list[Monomial]) -> LinearForm | None:
    return fit(targets[:, None, None].astype(np.float64), table, family)[0] if targets.size >= _LEAST_ROWS else None


def _two(
    targets: Int64, table: Table, family: list[Monomial], names: Names
) -> tuple[tuple[LinearForm, ...], str] | None:
    """Two forms and how they combine. The second is also tried with monomials in microbatches first: at few sizes
    microbatches and ranks may be equal, so that either fits.
    """
    ranks, microbatches, *_ = names
    ample = table[microbatches] >= 2 * table[ranks]
    first = _fit(targets[ample], chosen_rows(table, ample), family)
    if first is None:
        return None
    rest = first.at(table)[:, 0] != targets
    for ordered in (family, sorted(family, key=lambda m: microbatches not in [atom.text for atom in m])):
        second = _fit(targets[rest], chosen_rows(table, rest), ordered)
        if second is None:
            return None
        values = first.at(table)[:, 0], second.at(table)[:, 0]
        if how := next((name for name, how in COMBINE.items() if (how(*values) == targets).all()), ""):
            return (first, second), how
    return None


def count_left_out(pieces: Sequence[CountPiece], targets: Int64, table: Table, names: Names) -> Example | None:
    """A value of ``targets`` [n], the rows of the table, that no piece covers, at the smallest size that has one.

    Where there is one, it is a value that no formula of the pieces gives.
    """
    covered, given = np.zeros((2, targets.size), bool)
    for piece in pieces:
        covered |= piece.applies(table, names)
        given |= np.abs(piece.at(table) - targets) <= 1e-6
    if covered.all():
        return None
    sizes = [table[name].tolist() for name in names[:2]]
    row = min(np.flatnonzero(~covered).tolist(), key=lambda row: (given[row], *(size[row] for size in sizes)))
    return Example(sizes_at(table, row), {}, float(targets[row]))


def verify_count(
    piece: CountPiece, targets: Int64, table: Table, names: Names, fitted: Table
) -> CountPiece | FailedPiece | Untried:
    """The piece with the number of held-out values that it gives, or the first held-out value that it does not give.

    targets: [n] held-out counts. `Untried`: the piece depends on ranks or microbatches, and no held-out size has more
    of them than ``fitted``.
    """
    applies, values = piece.applies(table, names), piece.at(table)
    wrong = np.flatnonzero(applies & (np.abs(values - targets) > 1e-6))
    if wrong.size:
        row = int(wrong[0])
        return FailedPiece(piece.forms[0], sizes_at(table, row), {}, float(values[row]), float(targets[row]))
    if applies.any():
        there = chosen_rows(fitted, piece.applies(fitted, names))
        if missing := untried(piece.forms, piece.region, chosen_rows(table, applies), there, names):
            return missing
    return replace(piece, tested=int(applies.sum()))
