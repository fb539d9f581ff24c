"""The invariants of a `Schedule`, one function each: what an order of ops must be before anything else looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import CompilerBug, Diagnostic, Label
from schedc.ir.arrays import Bools, Int32, Int64, bincount
from schedc.ir.op_tables import BACKWARD, PAIRS, TURN
from schedc.ir.ops import FACTS, LETTERS, PAIR_NAMES, OpKind
from schedc.ir.schedule import OP_COLUMNS, Schedule
from schedc.source import NOWHERE, Span
from schedc.units import equations

F, I, W, B = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741

SHOWN = 3
"""Places at which findings of one kind are shown; the others are counted."""


def verify(schedule: Schedule) -> list[Diagnostic]:
    """Everything that is wrong with the ops of a schedule, rank by rank. `schedc.step.legality` looks for circles of
    waiting ranks. Raises `CompilerBug` if the columns themselves are inconsistent.
    """
    _check_columns(schedule)
    if found := _is_empty(schedule) or _names_nothing(schedule):
        return found  # the other checks index by op, stage and microbatch
    table = _Table(schedule)
    return [diagnostic for invariant in INVARIANTS for diagnostic in invariant(table)]


@dataclass(frozen=True, eq=False)
class _Table:
    """The ops by stage and microbatch. A slot is one (stage, microbatch): stage * microbatches + microbatch."""

    schedule: Schedule

    @cached_property
    def slot(self) -> Int64:
        """[ops]"""
        return self.schedule.stage.astype(np.int64) * self.schedule.microbatches + self.schedule.microbatch

    @property
    def slots(self) -> int:
        return self.schedule.stages * self.schedule.microbatches

    @property
    def covered(self) -> int:
        """Slots that the tables hold. Every slot takes two ops, so that of more slots than ops one of the first is
        incomplete for certain: no table is larger than the schedule."""
        return min(self.slots, len(self.schedule) + 1)

    @cached_property
    def row(self) -> Int32:
        """[kinds, covered] row of the op of each kind, -1 where there is none; of several the first."""
        rows = np.full((len(OpKind), self.covered), -1, np.int32)
        place = self.schedule.kind * np.int64(self.covered) + self.slot
        row = np.arange(len(self.schedule), dtype=np.int32)
        if self.covered < self.slots:
            row = row[self.slot < self.covered]
            place = place[row]
        rows.ravel()[place[::-1]] = row[::-1]  # the last that is stored stays
        return rows

    @cached_property
    def backward(self) -> Int32:
        """[covered] row of the backward of each slot, B or I; -1 where it has none."""
        return np.asarray(self.row[BACKWARD].max(axis=0))

    def place(self, row: int, text: str) -> Label:
        return Label(self.schedule.spans[self.schedule.span[row]], text)

    def finding(
        self, code: str, row: int, message: str, here: str, others: Sequence[Label] = (), help: str = ""
    ) -> Diagnostic:
        """A diagnostic at the op of ``row``; says on which rank and at which sizes, which the text does not."""
        where = f"{here} (rank {self.schedule.rank[row]}, {equations(self.schedule.sizes)})"
        primary = self.place(row, where)
        notes = _phase(self.schedule, row) if primary.span == NOWHERE else ()
        shown = tuple(label for label in others if label.span not in (NOWHERE, primary.span))
        return Diagnostic(code, message, primary, shown, notes, help, source=self.schedule.source)


def _phase(schedule: Schedule, row: int) -> tuple[str, ...]:
    name = schedule.phases[schedule.phase[row]]
    return (f"{schedule.describe(row)}, in phase {name}",) if name else (schedule.describe(row),)


def _first(
    rows: npt.NDArray[np.int64], places: npt.NDArray[Any], total: int, describe: Callable[[int], Diagnostic]
) -> list[Diagnostic]:
    """One finding for each of the first places, the last of which says how many more findings there are.

    places: [rows] a key for the source place of each row; one line of a rank block yields many ops of many ranks.
    """
    _, first = np.unique(places, return_index=True)
    shown = [describe(int(row)) for row in rows[np.sort(first)[:SHOWN]]]
    if (more := total - len(shown)) > 0 and shown:
        shown[-1] = replace(shown[-1], notes=(*shown[-1].notes, f"and {more} more like this"))
    return shown


# Invariants of the columns: whoever built the schedule is at fault, not the user.


def _check_columns(schedule: Schedule) -> None:
    n, start = len(schedule), schedule.rank_start
    columns = {name: getattr(schedule, name) for name in OP_COLUMNS}
    ranges = {"kind": (0, len(OpKind)), "pair": (-1, np.inf), "phase": (0, len(schedule.phases)),
              "span": (0, len(schedule.spans))}  # fmt: skip

    def wrong() -> Iterable[str]:
        yield from (f"column {name} has {c.shape}, kind has {n} rows" for name, c in columns.items() if c.shape != (n,))
        if start.shape != (schedule.ranks + 1,) or start[0] != 0 or start[-1] != n or (np.diff(start) < 0).any():
            yield f"rank_start {start} does not split {n} rows over {schedule.ranks} ranks"
        for name, (low, high) in ranges.items():
            column = columns[name]
            if column.size and not low <= column.min() <= column.max() < high:
                yield f"column {name} leaves {low} ..< {high}"

        if not _pairs_are_neighbours(schedule):
            yield "a pair number is not that of exactly two neighbouring ops of a rank"

    for message in wrong():
        raise CompilerBug("elaborate", message, dump=f"{schedule.name} at {dict(schedule.sizes)}: {n} ops")


def _pairs_are_neighbours(schedule: Schedule) -> bool:
    pair, rank = schedule.pair, schedule.rank
    rows = np.flatnonzero(pair >= 0)
    first, second = rows[::2], rows[1::2]
    return (
        first.size == second.size
        and bool(((first + 1 == second) & (pair[first] == pair[second]) & (rank[first] == rank[second])).all())
        and (bool((np.diff(pair[first]) > 0).all()) or np.unique(pair[first]).size == first.size)
    )


def _names_nothing(schedule: Schedule) -> list[Diagnostic]:
    """S201: every op names a stage and a microbatch that exist."""
    stage, microbatch = schedule.stage, schedule.microbatch
    wrong_stage = (stage < 0) | (stage >= schedule.stages)
    wrong = np.flatnonzero(wrong_stage | (microbatch < 0) | (microbatch >= schedule.microbatches))
    table = _Table(schedule)

    def describe(row: int) -> Diagnostic:
        noun, number, count = (
            ("stage", stage[row], schedule.stages) if wrong_stage[row] else
            ("microbatch", microbatch[row], schedule.microbatches)
        )  # fmt: skip
        return table.finding("S201", row, f"{noun} {number} does not exist: there are {count}, from 0",
                             f"this {_name(schedule, row)}")  # fmt: skip

    return _first(wrong, schedule.span[wrong], wrong.size, describe)


def _is_empty(schedule: Schedule) -> list[Diagnostic]:
    """S203: there is an op."""
    if len(schedule):
        return []
    help = "every microbatch needs an F and a B, or an I and a W, on each stage"
    label = Label(schedule.spans[0] if schedule.spans else NOWHERE)
    return [Diagnostic("S203", f"no op runs at {equations(schedule.sizes)}", label, help=help, source=schedule.source)]


# Invariants of the ops. Each takes the table and gives the diagnostics.


def _on_its_rank(table: _Table) -> list[Diagnostic]:
    """S202: every op runs on the rank that holds its stage for its microbatch."""
    schedule = table.schedule
    holder = schedule.placement.rank_of(schedule.stage, schedule.microbatch)
    wrong = np.flatnonzero(holder != schedule.rank)

    def describe(row: int) -> Diagnostic:
        stage, microbatch = schedule.stage[row], schedule.microbatch[row]
        message = f"stage {stage} of microbatch {microbatch} is on rank {holder[row]}, not on rank {schedule.rank[row]}"
        return table.finding("S202", row, message, f"this {_name(schedule, row)}",
                             help="an op runs where the placement puts its stage")  # fmt: skip

    return _first(wrong, schedule.span[wrong], wrong.size, describe)


def _runs_once(table: _Table) -> list[Diagnostic]:
    """S205: no op runs twice, and a microbatch has one backward on a stage, B or I."""
    schedule = table.schedule
    # a stable sort puts the ops with one key next to each other, in the order of their rows
    key = TURN[schedule.kind] * np.int64(table.slots) + table.slot
    if table.slots <= len(schedule) and bincount(key, minlength=1).max(initial=0) <= 1:
        return []
    order = np.argsort(key, kind="stable")
    again = np.flatnonzero(key[order[1:]] == key[order[:-1]])
    again = again[np.argsort(order[again + 1])]

    def describe(at: int) -> Diagnostic:
        row, earlier = int(order[at + 1]), int(order[at])
        what = _name(schedule, row)
        both = schedule.kind[row] != schedule.kind[earlier]
        message = (
            f"{_subject(schedule, row)} runs as B and as I: B already contains I and W" if both
            else f"{_subject(schedule, row)} runs twice"
        )  # fmt: skip
        where = table.place(earlier, f"it ran here first, as {_op(schedule, earlier)}")
        return table.finding("S205", row, message, f"a {what} too many", [where])

    return _first(again, schedule.span[order[again + 1]], again.size, describe)


def _is_complete(table: _Table) -> list[Diagnostic]:
    """S203: every (stage, microbatch) has an F, a backward, and after an I a W."""
    row = table.row
    lacking = {
        "forward": (row[F] < 0, np.maximum(row[W], table.backward)),
        "backward": (table.backward < 0, np.maximum(row[F], row[W])),
        "weight gradient": ((row[I] >= 0) & (row[W] < 0), row[I]),
    }
    return [d for what, (lacks, other) in lacking.items() for d in _lacking(table, what, lacks, other)]


def _lacking(table: _Table, what: str, lacks: Bools, other: Int32) -> list[Diagnostic]:
    """other: [covered] an op of the same slot that does run, else -1."""
    schedule, slots = table.schedule, np.flatnonzero(lacks)
    if not slots.size:
        return []
    unknown = 0 if what == "weight gradient" else table.slots - table.covered
    present = np.unique(table.slot[(table.slot >= table.covered) & _makes(schedule, what)]).size if unknown else 0

    rows = other[slots]
    places = np.where(rows >= 0, schedule.span[rows], -1 - slots // schedule.microbatches)

    def describe(slot: int) -> Diagnostic:
        stage, microbatch = divmod(slot, schedule.microbatches)
        rank = int(schedule.placement.rank_of(np.array([stage]), np.array([microbatch]))[0])
        message = f"the {what} of microbatch {microbatch} on stage {stage} never runs"
        if (row := int(other[slot])) >= 0:
            help = "add a W, or write B instead of I" if what == "weight gradient" else ""
            return table.finding("S203", row, message, f"its {_name(schedule, row)} is here", help=help)
        low, high = schedule.rank_start[rank], schedule.rank_start[rank + 1]
        same = low + np.flatnonzero((schedule.stage[low:high] == stage) & _makes(schedule, what)[low:high])
        if same.size:
            last = int(same[-1])
            return table.finding("S203", last, message, f"the last {what} of stage {stage} is that of microbatch "
                                 f"{schedule.microbatch[last]}, here")  # fmt: skip
        note = f"rank {rank} runs no {what} of stage {stage} at {equations(schedule.sizes)}"
        return Diagnostic("S203", message, Label(_end_of_rank(schedule, rank)), notes=(note,), source=schedule.source)

    return _first(slots, places, slots.size + unknown - present, describe)


def _end_of_rank(schedule: Schedule, rank: int) -> Span:
    low, high = schedule.rank_start[rank], schedule.rank_start[rank + 1]
    return schedule.spans[schedule.span[high - 1]] if high > low else NOWHERE


def _makes(schedule: Schedule, what: str) -> Bools:
    if what == "backward":
        return np.asarray(BACKWARD[schedule.kind])
    return np.asarray(schedule.kind == (F if what == "forward" else W))


def _weights_follow_inputs(table: _Table) -> list[Diagnostic]:
    """S207: a W runs only where the backward was split, that is after an I and not after a B."""
    schedule, row = table.schedule, table.row
    slots = np.flatnonzero((row[W] >= 0) & (row[I] < 0) & (row[B] >= 0))

    def describe(slot: int) -> Diagnostic:
        w, b = int(row[W, slot]), int(row[B, slot])
        message = f"{_subject(schedule, w)} runs twice: alone and inside a full backward"
        here = [table.place(b, "this full backward computes the same")]
        return table.finding("S207", w, message, "a weight gradient too many", here,
                             help="split the backward: write I instead of B, or leave the W out")  # fmt: skip

    return _first(slots, schedule.span[row[W, slots]], slots.size, describe)


def _in_order(table: _Table) -> list[Diagnostic]:
    """S204: on a rank, an op comes after those whose results it takes, also across stages of one rank."""
    row, shape = table.row, (table.schedule.stages, table.schedule.microbatches)
    found: list[Diagnostic] = []
    for needed in FACTS:
        for followers in _followers(needed):
            rows = row[followers].max(axis=0)  # a slot has one op of them at most
            found += _misordered(table, row[needed], rows, f"its {FACTS[needed].name}")
    if table.covered < table.slots:
        return found
    forward, backward = row[F].reshape(shape), table.backward.reshape(shape)
    found += _misordered(table, forward[:-1].ravel(), forward[1:].ravel(), "the forward of the stage before it")
    return found + _misordered(table, backward[1:].ravel(), backward[:-1].ravel(), "the backward of the stage after it")


def _followers(needed: OpKind) -> Iterable[list[OpKind]]:
    """The kinds that must follow ``needed`` on a stage, those of one turn together."""
    followers = [kind for kind in OpKind if needed.name in FACTS[kind].follows]
    for turn in sorted({FACTS[kind].turn for kind in followers}):
        yield [kind for kind in followers if FACTS[kind].turn == turn]


def _misordered(table: _Table, needed: Int32, comes: Int32, what: str) -> list[Diagnostic]:
    """needed, comes: rows of two ops, elementwise, -1 where there is none; the second takes the result of the first."""
    schedule = table.schedule
    rank, pair, kind = schedule.rank, schedule.pair, schedule.kind
    early = np.flatnonzero(
        (needed >= 0) & (comes >= 0) & (rank[needed] == rank[comes])
        & ((needed > comes) | ((pair[needed] >= 0) & (pair[needed] == pair[comes])))
    )  # fmt: skip
    early = early[np.argsort(comes[early], kind="stable")]

    def describe(at: int) -> Diagnostic:
        row, other = int(comes[at]), int(needed[at])
        overlaps = other < row
        message = f"{_subject(schedule, row)} {'overlaps' if overlaps else 'runs before'} {what}"
        code, help = "S204", (
            "the two ops of a pair run at the same time: pair ops that do not need each other" if overlaps
            else f"on this rank, {_op(schedule, other)} has to come before {_op(schedule, row)}"
        )  # fmt: skip
        if kind[row] == W and pair[row] >= 0:
            own = _op(schedule, row)
            code, help = "S208", f"run {_op(schedule, other)} before the pair: {own} fits beside an F or an I behind it"
        label = table.place(other, f"{what} is here")
        return table.finding(code, row, message, f"this {_name(schedule, row)}", [label], help)

    return _first(early, schedule.span[comes[early]], early.size, describe)


def _pairs_what_overlaps(table: _Table) -> list[Diagnostic]:
    """S206: an overlapped pair is one of `PAIR_NAMES`: a forward first, or an I with a W."""
    schedule = table.schedule
    first = np.flatnonzero(schedule.pair >= 0)[::2]
    kind = schedule.kind
    wrong = first[~PAIRS[kind[first], kind[first + 1]]]

    def describe(row: int) -> Diagnostic:
        names = " and ".join(_name(schedule, r) for r in (row, row + 1))
        others = [table.place(row + 1, "overlapped with this")]
        return table.finding("S206", row, f"a pair of {names}", f"this {_name(schedule, row)}", others,
                             help=f"pairs are {', '.join(map(' & '.join, PAIR_NAMES))}, in this order")  # fmt: skip

    return _first(wrong, schedule.span[wrong], wrong.size, describe)


INVARIANTS: tuple[Callable[[_Table], list[Diagnostic]], ...] = (
    _on_its_rank,
    _is_complete,
    _runs_once,
    _weights_follow_inputs,
    _in_order,
    _pairs_what_overlaps,
)


def _name(schedule: Schedule, row: int) -> str:
    return FACTS[OpKind(int(schedule.kind[row]))].name


def _op(schedule: Schedule, row: int) -> str:
    return f"{schedule.stage[row]}{LETTERS[schedule.kind[row]]}{schedule.microbatch[row]}"


def _subject(schedule: Schedule, row: int) -> str:
    return f"{_name(schedule, row)} of microbatch {schedule.microbatch[row]} on stage {schedule.stage[row]}"
