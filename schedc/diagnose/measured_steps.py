"""Recorded steps as arrays over the cells of a schedule, which is rebuilt from the trace or given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from schedc.diagnose.expert_loads import uneven_times
from schedc.diagnose.exposed_copies import ExposedCopies, exposed_copies
from schedc.diagnose.recording import Op, RunRecording
from schedc.diagnose.send_waits import SendWaits, send_waits
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.interchange.torch_cells import read_cells
from schedc.interchange.torch_placement import infer_placement
from schedc.ir.arrays import Floats
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_dependencies
from schedc.step.measured import cell_inputs

_CLOCK = 1.0
"""Milliseconds by which a message may seem to arrive before it was sent; above it clocks are refused."""


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """S steps of one schedule, in ms from the first moment at which a rank could have begun to compute.

    wait, waited, begin, end, off_core, collecting: [S, cells] as in `CellRun`.
    sent: [S, 2, cells] time at which the message for a cell's forward, and for its backward, was sent; NaN: unknown.
    posted: [S, 2, cells] time at which its receive was posted; NaN: unknown.
    release: [S, P] when each rank began. sends: waits for sends. copies: exposed copies.
    uneven: [S, cells] of a cell's time what uneven experts take. fullest: rows of fullest ranks over their mean.
    """

    recording: RunRecording
    dependencies: Dependencies
    wait: Floats
    waited: Floats
    begin: Floats
    end: Floats
    sent: Floats
    posted: Floats
    release: Floats
    off_core: Floats
    collecting: Floats
    sends: SendWaits
    copies: ExposedCopies
    uneven: Floats
    fullest: float

    @property
    def makespan(self) -> Floats:
        """[S] the measured time of each step."""
        return np.asarray((self.end + self.copies.behind).max(axis=1))


def measured_steps(recording: RunRecording, given: Schedule | None = None) -> MeasuredSteps:
    """The steps of a recording. given: the schedule that ran; None rebuilds it from the ops of the trace.

    Raises `DiagnosticError`: S617 where ranks, steps or the given schedule do not fit together, S618 for clocks that
    contradict messages.
    """
    schedule = given or _rebuilt(recording)
    known, findings = check_dependencies(schedule)
    if known is None or findings:
        first = findings[0]
        _misfit(
            recording, f"the ops of the trace are no legal schedule: {first.message}", "trace whole steps of all ranks"
        )
    _same_order(recording, known)
    steps = len(recording.ranks[0])
    times = np.array(
        [[cell[1:] for rank in recording.ranks for cell in rank[step].cells] for step in range(steps)]
    )  # [S, cells, 6]
    sent, posted = np.full((2, steps, 2, len(known)), np.nan)
    where = _readers(known)
    release = np.array([[rank[step].begin for rank in recording.ranks] for step in range(steps)])
    for step in range(steps):
        for rank in recording.ranks:
            for table, found in ((sent, rank[step].sent), (posted, rank[step].posted)):
                for key, time in found.items():
                    if (cell := where.get(key)) is not None:
                        table[step, key[0], cell] = time
    begin = _begins(known, release)[:, None]
    wait, waited, start, end = np.moveaxis(times[:, :, :4] - begin[:, :, None], 2, 0)
    posted -= begin[:, None]
    sends = send_waits(recording, known, where, posted, end, begin[:, 0])
    result = MeasuredSteps(
        recording, known, wait, waited, start, end, sent - begin[:, None], posted,
        np.maximum(release - begin, 0.0), times[:, :, 4], times[:, :, 5], sends,
        exposed_copies(recording, known, times[:, :, 0], times[:, :, 3]), *uneven_times(recording, known),
    )  # fmt: skip
    _check_clocks(result)
    return result


def _rebuilt(recording: RunRecording) -> Schedule:
    """The schedule whose ops the first step ran."""
    ops = [[cell.ops for cell in rank[0].cells] for rank in recording.ranks]
    lines = (",".join(_text((op,)) for cell in cells for op in cell if op[0] != OpKind.R) for cells in ops)
    try:
        placement = infer_placement(read_cells(Source(recording.source.name, "\n".join(lines) + "\n")))
    except DiagnosticError as error:
        _misfit(recording, f"the ops of the trace are no schedule: {error.diagnostics[0].message}", "trace all ranks")
    flat = [(number, op) for number, cell in enumerate(c for rank in ops for c in rank) for op in cell]
    size = {number: len(cell) for number, cell in enumerate(c for rank in ops for c in rank)}
    counts = [sum(map(len, rank)) for rank in ops]
    return Schedule(
        name=recording.schedule,
        sizes={"P": placement.ranks, "M": placement.microbatches},
        placement=placement,
        rank_start=np.cumsum([0, *counts]).astype(np.int64),
        kind=np.array([op[0] for _, op in flat], np.int8),
        stage=np.array([op[1] for _, op in flat], np.int32),
        microbatch=np.array([op[2] for _, op in flat], np.int32),
        pair=np.array([number if size[number] > 1 else -1 for number, _ in flat], np.int32),
        phase=np.zeros(len(flat), np.int32),
        span=np.zeros(len(flat), np.int32),
    )


def _same_order(recording: RunRecording, dependencies: Dependencies) -> None:
    """Refuses a recording whose ranks or steps ran other cells than the schedule has, in another order."""
    schedule = dependencies.schedule
    if len(recording.ranks) != schedule.ranks:
        _misfit(
            recording,
            f"the trace has {len(recording.ranks)} ranks, the schedule has {schedule.ranks}",
            "give one file per rank of one pipeline, and the program that ran",
        )
    for rank, steps in enumerate(recording.ranks):
        low, high = dependencies.rank_start[rank : rank + 2].tolist()
        wanted = [_ops(dependencies, cell) for cell in range(low, high)]
        for number, step in enumerate(steps):
            ran = [cell.ops for cell in step.cells]
            if ran != wanted:
                place = next(
                    (i for i, (a, b) in enumerate(zip(ran, wanted, strict=False)) if a != b), min(len(ran), len(wanted))
                )
                texts = (_text(x[place]) if place < len(x) else "nothing" for x in (ran, wanted))
                here, there = texts
                _misfit(
                    recording,
                    f"rank {rank} ran {here} as cell {place} of step {number}; the schedule has {there} there",
                    "give the traces of one run, whole steps, and the program that ran",
                )


def _ops(dependencies: Dependencies, cell: int) -> tuple[Op, ...]:
    schedule = dependencies.schedule
    rows = [int(row) for row in (dependencies.first[cell], dependencies.second[cell]) if row >= 0]
    return tuple((int(schedule.kind[r]), int(schedule.stage[r]), int(schedule.microbatch[r])) for r in rows)


def _text(ops: tuple[Op, ...]) -> str:
    return " & ".join(f"{stage}{LETTERS[kind]}{microbatch}" for kind, stage, microbatch in ops)


def measured_cell_name(dependencies: Dependencies, cell: int) -> str:
    """``2F3``, or ``2F3 & 1B0``."""
    return _text(_ops(dependencies, cell))


def _readers(dependencies: Dependencies) -> dict[tuple[int, int, int], int]:
    """The cell that waits for each message, by key."""
    result = {}
    schedule = dependencies.schedule
    for row, kinds in enumerate(((OpKind.F,), (OpKind.B, OpKind.I))):
        rows = np.flatnonzero(np.isin(schedule.kind, kinds))
        keys = zip(schedule.stage[rows].tolist(), schedule.microbatch[rows].tolist(), strict=True)
        for key, cell in zip(keys, dependencies.cell_of[rows].tolist(), strict=True):
            result[row, *key] = cell
    return result


def _begins(dependencies: Dependencies, release: Floats) -> Floats:
    """[S] when each step began: with the first rank whose first cell waits for no message."""
    first = dependencies.rank_start[:-1]
    filled = np.flatnonzero(first < dependencies.rank_start[1:])
    free = filled[~dependencies.remote[:, first[filled]].any(axis=0)]
    return np.asarray(release[:, free].min(axis=1))


def _check_clocks(steps: MeasuredSteps) -> None:
    """Refuses clocks by which a cell began before what it needs was computed."""
    known, inputs = steps.dependencies, cell_inputs(steps.dependencies)
    far = np.flatnonzero(inputs.message & ~known.pairs[inputs.reader])  # a message may come inside of a pair
    reader, way, producer = inputs.reader[far], inputs.way[far], inputs.producer[far]
    early = steps.end[:, producer] - steps.end[:, reader]
    worst = np.fmax(early, steps.sent[:, way, reader] - steps.begin[:, reader])
    if not worst.size or worst.max() <= _CLOCK:
        return
    step, number = np.unravel_index(int(worst.argmax()), worst.shape)
    cell, other = int(reader[number]), int(producer[number])
    begins = f"{measured_cell_name(known, cell)} of rank {known.rank[cell]} begins {worst.max():.1f} ms"
    sends = f"{measured_cell_name(known, other)} is sent by rank {known.rank[other]} (step {step})"
    message = f"{begins} before the message of {sends}"
    help = "keep the clocks of the hosts together (PTP, or chrony), or trace ranks of one host"
    raise DiagnosticError([Diagnostic("S618", message, help=help, source=steps.recording.source)])


def _misfit(recording: RunRecording, message: str, help: str) -> NoReturn:
    raise DiagnosticError([Diagnostic("S617", message, help=help, source=recording.source)])
