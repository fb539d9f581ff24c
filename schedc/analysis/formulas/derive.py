"""`derive`: everything that `schedc report` says about a schedule, as formulas that held wherever they were tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from schedc.analysis.dependencies import Bools
from schedc.analysis.formulas.counts import RANK, CountFailure, CountPiece, count_left_out, find_counts, verify_count
from schedc.analysis.formulas.domains import Domain, domains_of
from schedc.analysis.formulas.fit import Table
from schedc.analysis.formulas.grid import Grid, Size, columns, size_grid
from schedc.analysis.formulas.measure import COUNTS, TIMES, TOTALS, Floats, counts, linear_forms, times
from schedc.analysis.formulas.pieces import (
    Example,
    Failure,
    Piece,
    Samples,
    Untried,
    coverage,
    find_pieces,
    left_out,
    verify_piece,
)
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import repeat
from schedc.ir.schedule import Int64
from schedc.syntax.tree import ScheduleTree

_SEED = 20240110
_VECTORS, _MORE, _MANY, _FRESH, _TIES = 40, 96, 1000, 128, 32
"""Cost vectors for forms, for conditions (simulated and not), and for verification (generic, and with many ties)."""

LEAST_SIZES = 12
_SMALL = 4

DEFINITIONS: dict[str, str] = {
    "bubble": "makespan less the time that a rank computes",
    "span_bubble": "from a rank's first op to its last, less the time that it computes",
    "peak_activations": "chunks held at most, of one microbatch each, until its B or W; inside an overlapped pair too",
    "peak_activations_between": "the same, counted between cells",
    "peak_pending_weight": "chunks held at most that only wait for their W",
    "messages_sent": "messages that a rank sends in a step",
    "messages": "messages of a step, activations and gradients together",
    "busiest_link": "messages between the two ranks that exchange most",
}


@dataclass(frozen=True, eq=False)
class TimeResult:
    """A time in one domain of costs: pieces that were verified, those that were not, and what is covered.

    covered: share of the samples at held-out sizes that some piece speaks of; 1 where nothing is left out.
    example: one of the other samples.
    """

    quantity: str
    domain: Domain
    pieces: tuple[Piece, ...]
    failures: tuple[Failure | Untried, ...]
    covered: float
    example: Example | None


@dataclass(frozen=True, eq=False)
class CountResult:
    """A count: pieces that were verified (none if it is unknown), those that were not, a value that none speaks of."""

    quantity: str
    pieces: tuple[CountPiece, ...]
    failures: tuple[CountFailure | Untried, ...]
    example: Example | None
    largest: bool
    """Whether it is the largest over the ranks, where no formula gives that of each."""


@dataclass(frozen=True, eq=False)
class Derivation:
    """The formulas of a schedule, and the sizes that they come from."""

    tree: ScheduleTree
    grid: Grid
    times: tuple[TimeResult, ...]
    counts: tuple[CountResult, ...]


def derive(tree: ScheduleTree, progress: Callable[[int, int], None] | None = None) -> Derivation:
    """Fit formulas of times and counts, and verify them at sizes and costs that they were not fitted to.

    Deterministic. ``progress`` is told how many of how many measurements are done. Raises `DiagnosticError`: what is
    wrong at the first size tried if no size is legal, S503 if too few are.
    """
    grid = size_grid(tree)
    _require_sizes(tree, grid)
    every = (*grid.fitted, *grid.held_out)
    domains = domains_of([size.cells for size in every])
    total, done = len(domains) * len(every), 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    found = [result for number, domain in enumerate(domains) for result in _times(grid, domain, number, tick)]
    return Derivation(tree, grid, tuple(found), _counts(grid))


def _require_sizes(tree: ScheduleTree, grid: Grid) -> None:
    if len(grid.fitted) >= LEAST_SIZES and grid.held_out:
        return
    if grid.illegal and not grid.fitted:
        raise DiagnosticError(grid.illegal)
    message = f"`{tree.name}` is legal at {len(grid.fitted)} of the sizes that formulas are fitted to"
    help = f"at least {LEAST_SIZES} are needed: relax what the schedule requires"
    raise DiagnosticError([Diagnostic("S503", message, Label(tree.span), help=help, source=tree.source)])


# Times.


def _times(grid: Grid, domain: Domain, number: int, tick: Callable[[], None]) -> list[TimeResult]:
    rng = np.random.default_rng([_SEED, number])
    vectors, more = domain.vectors(rng, _VECTORS), domain.vectors(rng, _MORE)
    fresh = np.concatenate([domain.vectors(rng, _FRESH), domain.vectors(rng, _TIES, _SMALL)])
    many = domain.vectors(rng, _MANY)
    forms, extra, held_out = [], [], []
    for size in grid.fitted:
        forms.append(linear_forms(size.cells, domain, vectors))
        extra.append(times(size.cells, domain, more))
        tick()
    for size in grid.held_out:
        held_out.append(times(size.cells, domain, fresh))
        tick()
    table = columns(grid.fitted, grid.names)
    results = []
    for quantity in TIMES:
        values, even, form, exact = (
            np.stack([getattr(f[quantity], part) for f in forms]) for part in ("values", "even", "forms", "exact")
        )
        samples = Samples(table, vectors, values, even, form, exact)
        again = _without_forms(table, more, [e[quantity] for e in extra])
        both = Samples(
            table,
            np.concatenate([vectors, more]),
            np.concatenate([values, again.values], axis=1),
            np.concatenate([even, again.even], axis=1),
            again.forms,
            again.exact,
        )
        tests = _without_forms(columns(grid.held_out, grid.names), fresh, [h[quantity] for h in held_out])
        results.append(
            _verified(quantity, grid, domain, find_pieces(samples, both, many, domain, _names(grid)), tests, table)
        )
    return results


def _names(grid: Grid) -> tuple[str, str, tuple[str, ...]]:
    return grid.ranks, grid.microbatches, grid.others


def _without_forms(table: Table, vectors: Int64, measured: Sequence[tuple[Floats, Bools]]) -> Samples:
    values, even = np.stack([m[0] for m in measured]), np.stack([m[1] for m in measured])
    nothing = np.zeros((len(measured), 0))
    return Samples(table, vectors, values, even, nothing, nothing.astype(bool))


def _verified(
    quantity: str, grid: Grid, domain: Domain, pieces: list[Piece], tests: Samples, fitted: Table
) -> TimeResult:
    names = grid.ranks, grid.microbatches
    outcomes = [verify_piece(piece, tests, domain, *names, fitted) for piece in pieces]
    good = tuple(o for o in outcomes if isinstance(o, Piece))
    failures = tuple(o for o in outcomes if isinstance(o, Failure | Untried))
    example = left_out(good, tests, domain, *names)
    return TimeResult(quantity, domain, good, failures, coverage(good, tests, *names), example)


# Counts.


def _counts(grid: Grid) -> tuple[CountResult, ...]:
    fitted = [counts(size.cells) for size in grid.fitted]
    held_out = [counts(size.cells) for size in grid.held_out]
    return tuple(_count(name, grid, fitted, held_out) for name in (*COUNTS, *TOTALS))


def _count(name: str, grid: Grid, fitted: list[dict[str, Int64]], held_out: list[dict[str, Int64]]) -> CountResult:
    for largest in (False, True):
        targets, known = _rows(name, grid.fitted, fitted, grid.names, largest)
        if (pieces := find_counts(targets, known, *_names(grid))) or name in TOTALS:
            break
    targets, table = _rows(name, grid.held_out, held_out, grid.names, largest)
    outcomes = [verify_count(piece, targets, table, grid.ranks, grid.microbatches, known) for piece in pieces]
    good = tuple(o for o in outcomes if isinstance(o, CountPiece) and o.tested)
    failures = tuple(o for o in outcomes if isinstance(o, CountFailure | Untried))
    example = count_left_out(good, targets, table, grid.ranks, grid.microbatches)
    return CountResult(name, good, failures, example, largest)


def _rows(
    name: str, sizes: Sequence[Size], measured: list[dict[str, Int64]], names: tuple[str, ...], largest: bool
) -> tuple[Int64, Table]:
    """The values of a count, a row per size (``largest`` over the ranks), or per size and rank, and their columns."""
    values = [m[name].max(keepdims=True) if largest else m[name] for m in measured]
    table = columns(sizes, names)
    if largest or name in TOTALS:
        return np.concatenate(values), table
    lengths = [v.size for v in values]
    table = {key: repeat(column, lengths) for key, column in table.items()}
    return np.concatenate(values), {**table, RANK: np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])}
