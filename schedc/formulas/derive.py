"""`derive`: the formulas that `schedc report` prints about a schedule, each proved at every size looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.exact.space import Space
from schedc.exact.times import LinearTimes
from schedc.formulas.conditions import pieces_of
from schedc.formulas.cost_domains import random_vectors, spaces_of, typical
from schedc.formulas.counts import RANK, CountPiece, count_left_out, find_counts, verify_count
from schedc.formulas.fit import Names, Table
from schedc.formulas.grid import Size, SizeGrid, columns, size_grid
from schedc.formulas.measure import TIMES, MeasuredTimes, measured, times_at
from schedc.formulas.pieces import Example, FailedPiece, Piece, Untried
from schedc.formulas.proof import DecidedSize, complete_in, left_out, prove
from schedc.formulas.regimes import find_regimes
from schedc.formulas.regions import SizeRegion
from schedc.ir.arrays import Int64, repeat
from schedc.step.rank_counts import COUNTS, TOTALS, counts
from schedc.syntax.tree import ScheduleTree
from schedc.units import equations

MOST_PIECES = 40
"""A time with more linear pieces at one size is not described by formulas."""

_EXAMPLES = 60
"""Cost vectors at which values that no piece covers are searched."""

LEAST_SIZES = 12
"""Legal sizes that a fit needs at least."""

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
    """A time over the costs of one space.

    pieces: proved at the sizes looked at. failures: fitted pieces that are not kept.
    complete: regions of sizes in which the time is the largest of the printed forms, at every size looked at and for
        all costs.
    sizes: how many were looked at. example: a value that no piece covers, if one was met.
    why: the reason why there are no pieces, where the time was not taken apart.
    """

    quantity: str
    space: Space
    pieces: tuple[Piece, ...]
    failures: tuple[FailedPiece | Untried, ...]
    complete: tuple[SizeRegion, ...]
    sizes: int
    example: Example | None
    why: str = ""


@dataclass(frozen=True, eq=False)
class CountResult:
    """A count: pieces that give every value, formulas that do not, and a value that no piece covers."""

    quantity: str
    pieces: tuple[CountPiece, ...]
    failures: tuple[FailedPiece | Untried, ...]
    example: Example | None
    largest: bool
    """Whether the count is the largest over the ranks: no formula gives the count of each rank."""


@dataclass(frozen=True, eq=False)
class Derivation:
    """The formulas of a schedule, and the sizes that they come from."""

    tree: ScheduleTree
    grid: SizeGrid
    times: tuple[TimeResult, ...]
    counts: tuple[CountResult, ...]


class _OutOfTime(Exception):
    """The seconds of a derivation are over."""


def derive(
    tree: ScheduleTree,
    progress: Callable[[int, int], None] | None = None,
    grid: SizeGrid | None = None,
    seconds: float | None = None,
) -> Derivation:
    """Formulas of times and counts, each decided at all sizes looked at: fitted ones and held-out ones.

    Deterministic, but for the times that are left out after so many seconds.

    progress: called with the measurements done and their number. grid: the sizes; by default those of `size_grid`.
    Raises `DiagnosticError`: the findings at the first size tried if no size is legal, S503 if too few are.
    """
    grid = grid or size_grid(tree)
    _require_sizes(tree, grid)
    spaces = spaces_of([size.cells for size in (*grid.fitted, *grid.held_out)])
    total, done = len(spaces) * len(TIMES) * (len(grid.fitted) + 1), 0
    last = None if seconds is None else perf_counter() + seconds

    def tick(count: int = 1) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)
        if last is not None and perf_counter() > last:
            raise _OutOfTime

    first = sorted(range(len(spaces)), key=lambda place: spaces[place].dimension)  # the quicker ones
    times = {place: tuple(_times(grid, spaces[place], tick)) for place in first}
    return Derivation(tree, grid, tuple(each for place in sorted(times) for each in times[place]), _counts(grid))


def _require_sizes(tree: ScheduleTree, grid: SizeGrid) -> None:
    if len(grid.fitted) >= LEAST_SIZES and grid.held_out:
        return
    if grid.illegal and not grid.fitted:
        raise DiagnosticError(grid.illegal)
    message = f"`{tree.name}` is legal at {len(grid.fitted)} of the sizes that formulas are fitted to"
    help = f"at least {LEAST_SIZES} are needed: relax what the schedule requires"
    raise DiagnosticError([Diagnostic("S503", message, Label(tree.span), help=help, source=tree.source)])


# Times.


def _times(grid: SizeGrid, space: Space, tick: Callable[..., None]) -> Iterator[TimeResult]:
    fitted, held_out = ([times_at(size.cells, space) for size in some] for some in (grid.fitted, grid.held_out))
    for name in TIMES:
        try:
            if None in fitted or None in held_out:
                tick(len(fitted) + 1)
                yield _unknown(name, space, grid, "it is not convex in the costs")
            else:
                yield _time(name, grid, space, [t for t in fitted if t], [t for t in held_out if t], tick)
        except _OutOfTime:
            yield _unknown(name, space, grid, "it was left undecided as the seconds of --time were over")


def _unknown(name: str, space: Space, grid: SizeGrid, why: str) -> TimeResult:
    return TimeResult(name, space, (), (), (), len(grid.fitted) + len(grid.held_out), None, why)


def _time(
    name: str,
    grid: SizeGrid,
    space: Space,
    fitted: Sequence[LinearTimes],
    held_out: Sequence[LinearTimes],
    tick: Callable[..., None],
) -> TimeResult:
    rows = _measured(name, grid, space, fitted, tick)
    tick()
    if isinstance(rows, str):
        return _unknown(name, space, grid, rows)
    names = grid.names
    table, other = columns(grid.fitted, names), columns(grid.held_out, names)
    latency = "p2p" in space.symbols  # the formulas of few microbatches would fill pages
    regimes = find_regimes(rows, table, names, remainders=not latency)
    sizes = [DecidedSize(table, row, space, times, TIMES[name], rows[row]) for row, times in enumerate(fitted)]
    sizes += [DecidedSize(other, row, space, times, TIMES[name]) for row, times in enumerate(held_out)]
    kept: list[Piece] = []
    failures: list[FailedPiece | Untried] = []
    for piece in (piece for regime in regimes for piece in pieces_of(regime, rows, table, names)):
        tick(0)
        outcome = prove(piece, sizes, table, names)
        if isinstance(outcome, Piece):
            kept.append(outcome)
        elif outcome is not None:
            failures.append(outcome)
    complete = tuple(regime.region for regime in regimes if complete_in(regime, kept, sizes, names))
    example = left_out(kept, sizes, random_vectors(space, _EXAMPLES, seed=1), names)
    kept.sort(key=lambda piece: (not _typical(piece, space, names), -piece.share))
    return TimeResult(name, space, tuple(kept), tuple(failures), complete, len(sizes), example)


def _measured(
    name: str, grid: SizeGrid, space: Space, fitted: Sequence[LinearTimes], tick: Callable[..., None]
) -> list[MeasuredTimes] | str:
    """[fitted] a time in all its pieces at every fitted size; or the reason why not. The largest size goes first."""
    order = sorted(range(len(fitted)), key=lambda row: -len(grid.fitted[row].cells))
    by_row: dict[int, MeasuredTimes] = {}
    for row in order:
        size = grid.fitted[row]
        pieces = measured(fitted[row], space, TIMES[name], MOST_PIECES)
        if pieces is None:
            tick(len(order) - len(by_row))
            return f"it has more than {MOST_PIECES} linear pieces at {equations(size.values)}"
        by_row[row] = pieces
        tick()
    return [by_row[row] for row in range(len(fitted))]


def _typical(piece: Piece, space: Space, names: Names) -> bool:
    """Whether a piece holds at typical costs on a few ranks with many microbatches."""
    size = dict.fromkeys(names, np.array([2])) | {names[0]: np.array([8]), names[1]: np.array([64])}
    if not piece.region.of(size, names)[0]:
        return False
    return all((condition.at(size)[0] @ typical(space) >= 0).all() for condition in piece.conditions)


# Counts.


def _counts(grid: SizeGrid) -> tuple[CountResult, ...]:
    fitted = [counts(size.cells) for size in grid.fitted]
    held_out = [counts(size.cells) for size in grid.held_out]
    return tuple(_count(name, grid, fitted, held_out) for name in (*COUNTS, *TOTALS))


def _count(name: str, grid: SizeGrid, fitted: list[dict[str, Int64]], held_out: list[dict[str, Int64]]) -> CountResult:
    for largest in (False, True):
        targets, fitted_table = _rows(name, grid.fitted, fitted, grid.names, largest)
        if (pieces := find_counts(targets, fitted_table, grid.names)) or name in TOTALS:
            break
    targets, table = _rows(name, grid.held_out, held_out, grid.names, largest)
    outcomes = [verify_count(piece, targets, table, grid.names, fitted_table) for piece in pieces]
    good = tuple(o for o in outcomes if isinstance(o, CountPiece) and o.tested)
    failures = tuple(o for o in outcomes if not isinstance(o, CountPiece))
    example = count_left_out(good, targets, table, grid.names)
    return CountResult(name, good, failures, example, largest)


def _rows(
    name: str, sizes: Sequence[Size], measured: list[dict[str, Int64]], names: tuple[str, ...], largest: bool
) -> tuple[Int64, Table]:
    """(values, columns) of a count: [sizes] with ``largest`` over the ranks or for a total, else [sizes and ranks]."""
    values = [m[name].max(keepdims=True) if largest else m[name] for m in measured]
    table = columns(sizes, names)
    if largest or name in TOTALS:
        return np.concatenate(values), table
    lengths = [v.size for v in values]
    table = {key: repeat(column, lengths) for key, column in table.items()}
    return np.concatenate(values), {**table, RANK: np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])}
