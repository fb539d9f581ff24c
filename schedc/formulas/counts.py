"""Formulas of counts: quasi-polynomials in sizes and rank, for all ranks or parts of them, or a min or max of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schedc.formulas.fit import LinearForm, Monomial, Table, beyond, families, fit
from schedc.formulas.pieces import Example, Untried
from schedc.formulas.regions import REGIONS, REMAINDERS, SizeRegion
from schedc.ir.arrays import Bools, Floats

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
    holds: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Bools]


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

    forms: one, or two that ``combine`` (min, max) joins. tested: number of held-out values that the piece gives.
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

    def applies(self, table: Table, ranks: str, microbatches: str) -> Bools:
        """[n] whether the piece covers each row."""
        inside = self.region.of(table, ranks, microbatches)
        return inside if self.part is None else inside & self.part.holds(table[RANK], table[ranks])


@dataclass(frozen=True)
class CountFailure:
    """A held-out size, with the rank if there is one, at which a fitted count differs from the measured one."""

    form: LinearForm
    sizes: dict[str, int]
    said: float
    measured: float


def find_counts(
    targets: npt.NDArray[np.int64], table: Table, ranks: str, microbatches: str, others: tuple[str, ...]
) -> list[CountPiece]:
    """Pieces that give every target at all sizes, or else in the first region of sizes that has such pieces.

    For sizes outside that region a second region is tried. No region: no pieces.
    targets: [n] counts. table: [n] columns, with `RANK` where each row is a rank.
    """
    by_rank = RANK in table
    monomials = list(families(ranks, microbatches, others, RANK if by_rank else None))

    def _in_region(region: SizeRegion) -> list[CountPiece]:
        for split in SPLITS if by_rank else ((None,),):
            pieces = []
            for part in split:
                blank = CountPiece(part, region, ())
                rows = blank.applies(table, ranks, microbatches)
                part_table = {name: column[rows] for name, column in table.items()}
                formula = _single(
                    targets[rows],
                    part_table,
                    monomials,
                    part_table[microbatches] >= 2 * part_table[ranks],
                    microbatches,
                )
                if formula is None:
                    break
                pieces.append(CountPiece(part, region, *formula))
            if len(pieces) == len(split):
                return pieces
        return []

    for region in REGIONS:
        if pieces := _in_region(region):
            if not region.texts:
                return pieces
            inside = region.of(table, ranks, microbatches)
            rest = [r for r in REMAINDERS if not (inside & r.of(table, ranks, microbatches)).any()]
            return pieces + next((more for r in rest if (more := _in_region(r))), [])
    return []


def _single(
    targets: npt.NDArray[np.int64], table: Table, monomials: list[list[Monomial]], ample: Bools, microbatches: str
) -> tuple[tuple[LinearForm, ...], str] | None:
    """(forms, combine): one form, or one fitted where microbatches are ample and one fitted where the first fails."""
    if targets.size < _LEAST_ROWS:
        return None
    plain = monomials[:2]
    for family in plain:
        if (form := _fit(targets, table, family)) is not None:
            return (form,), ""
    for family in (*plain, *monomials[3:4]):
        if (two := _two(targets, table, family, ample, microbatches)) is not None:
            return two
    for family in monomials[2:]:
        if (form := _fit(targets, table, family)) is not None:
            return (form,), ""
    return None


def _rows(table: Table, chosen: Bools) -> Table:
    return {name: column[chosen] for name, column in table.items()}


def _fit(targets: npt.NDArray[np.int64], table: Table, family: list[Monomial]) -> LinearForm | None:
    return fit(targets[:, None, None].astype(np.float64), table, family)[0] if targets.size >= _LEAST_ROWS else None


def _two(
    targets: npt.NDArray[np.int64], table: Table, family: list[Monomial], ample: Bools, microbatches: str
) -> tuple[tuple[LinearForm, ...], str] | None:
    """Two forms and how they combine. The second is also tried with monomials in microbatches first: at few sizes
    microbatches and ranks may be equal, so that either fits.
    """

    def part(rows: Bools, family: list[Monomial]) -> LinearForm | None:
        return _fit(targets[rows], {name: column[rows] for name, column in table.items()}, family)

    first = part(ample, family)
    if first is None:
        return None
    for ordered in (family, sorted(family, key=lambda m: microbatches not in [atom.text for atom in m])):
        second = part(first.at(table)[:, 0] != targets, ordered)
        if second is None:
            return None
        values = first.at(table)[:, 0], second.at(table)[:, 0]
        if how := next((name for name, how in COMBINE.items() if (how(*values) == targets).all()), ""):
            return (first, second), how
    return None


def count_left_out(
    pieces: Sequence[CountPiece], targets: npt.NDArray[np.int64], table: Table, ranks: str, microbatches: str
) -> Example | None:
    """A value of ``targets`` [n], the rows of the table, that no piece covers, at the smallest size that has one."""
    open_ = np.ones(targets.size, bool)
    for piece in pieces:
        open_ &= ~piece.applies(table, ranks, microbatches)
    order = np.lexsort([table[microbatches], table[ranks]])
    row = next((int(row) for row in order if open_[row]), None)
    if row is None:
        return None
    return Example({name: int(column[row]) for name, column in table.items()}, {}, float(targets[row]))


def verify_count(
    piece: CountPiece,
    targets: npt.NDArray[np.int64],
    table: Table,
    ranks: str,
    microbatches: str,
    fitted: Table | None = None,
) -> CountPiece | CountFailure | Untried:
    """The piece with the number of held-out values that it gives, or the first held-out value that it does not give.

    targets: [n] held-out counts. `Untried`: the piece depends on ranks or microbatches, and no held-out size has more
    of them than ``fitted``.
    """
    applies = piece.applies(table, ranks, microbatches)
    values = piece.at(table)
    wrong = np.flatnonzero(applies & (np.abs(values - targets) > 1e-6))
    if wrong.size:
        row = int(wrong[0])
        sizes = {name: int(column[row]) for name, column in table.items()}
        return CountFailure(piece.forms[0], sizes, float(values[row]), float(targets[row]))
    if fitted is not None and applies.any():
        there, inside = _rows(table, applies), piece.applies(fitted, ranks, microbatches)
        most = {name: int(fitted[name][inside].max()) for name in (ranks, microbatches)}
        if piece.region.bounds(most[ranks]):
            del most[ranks]
        if names := beyond(piece.forms, there, most):
            return Untried(piece.forms[0], names, tuple(most[name] for name in names))
    return replace(piece, tested=int(applies.sum()))
