"""Steps whose cells send before their ends and wait for messages after their beginnings."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int64, distinct
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept
from schedc.step.lowering import (
    CLOSED,
    FREE,
    GRADIENT,
    INPUT,
    LATENCY,
    CellInstruction,
    CellInstructions,
    Lowered,
    lower,
)
from schedc.step.numba_kernels import MAX
from schedc.step.placed_works import TimedWorks
from schedc.step.timeline import Timeline, arrivals, timeline_of
from schedc.step.walk import run
from schedc.step.work_lowering import Gaps


class MessageTimes(NamedTuple):
    """When a step ends under each of K costs, and the time of its busiest rank, first start to last end. [K] each."""

    makespan: Floats
    span: Floats


def message_times(dependencies: Dependencies, kind: Int64, delay: Floats, latency: Floats) -> MessageTimes:
    """The times of a step under each of K costs: those of `simulate_messages` of each alone.

    kind: [cells] index into ``delay``; delay: [kinds, 3, 3, K] delays as in `schedc.cell.delays`, in one unit.
    latency: [K] time of a message between ranks.
    """
    uses = (delay[:, :, 1:] > -np.inf).any(axis=(1, 3))
    cells = open_cells(dependencies, kind.astype(np.int64).tobytes(), uses.tobytes())
    lags = np.concatenate([np.zeros((1, latency.size)), latency[None], delay.reshape(-1, latency.size)])
    full = dependencies.rank_start[1:] > dependencies.rank_start[:-1]
    first = dependencies.rank_start[:-1][full]
    watch, place = np.unique(cells.end[[first, dependencies.rank_start[1:][full] - 1]], return_inverse=True)
    begun, ends = run(cells.walk, lags, np.zeros((0, latency.size)), watch=watch)[place.reshape(2, -1)]
    span = ends - (begun - delay[kind[first], 0, 0])
    return MessageTimes(*(np.asarray(each.max(axis=0, initial=0.0)) for each in (ends, span)))


def message_makespans(dependencies: Dependencies, kind: Int64, delay: Floats, latency: Floats) -> Floats:
    """[K] when a step ends under each of K costs; arguments as for `message_times`."""
    return message_times(dependencies, kind, delay, latency).makespan


class MessageStep(NamedTuple):
    """A step of cells that send early. works: [3, works] when each begins and ends, and how long it is exposed."""

    timeline: Timeline
    works: tuple[Floats, Floats, Floats] | None


def simulate_messages(
    dependencies: Dependencies,
    kind: Int64,
    duration: Floats,
    delay: Floats,
    latency: float,
    works: TimedWorks | None = None,
) -> MessageStep:
    """Simulates cells that send before their ends and wait for messages after their beginnings.

    kind: [cells] index into the next two. duration: [kinds] times without waits for messages; such waits count as idle
    time before the start. delay: [kinds, 3, 3] delays as in `schedc.cell.delays`. latency: time of a message.
    works: what runs beside the cells, each of which waits for the JOINs in front of it before its first step. All in
    one unit. A cell is bound by the arrival that its end waits for. A gradient leaves no sooner than the activation of
    the same cell: a Program posts the activation of a pair first (`schedc.step.program.insert_communication`).
    """
    keys = kind.astype(np.int64).tobytes(), (delay[:, :, 1:] > -np.inf).any(axis=1).tobytes()
    gaps = None if works is None else Gaps(dependencies, works.placed)
    cells = open_cells(dependencies, *keys) if gaps is None else _lowered(dependencies, *keys, gaps)
    lags = np.concatenate([[0.0, latency], delay.ravel()])
    times = np.zeros(0) if works is None else works.time
    values = np.append(run(cells.walk, lags[:, None], times[:, None])[:, 0], 0.0)
    there = values[cells.outs]
    arrival = arrivals(dependencies, there, latency)
    arrival[0] = values[cells.reached]
    timeline = timeline_of(dependencies, duration[kind], there[0], arrival + (delay[kind, 0].T - duration[kind]))
    timeline = replace(timeline, makespan=float(values[cells.closed].max(initial=0.0)))
    return MessageStep(timeline, None if gaps is None else gaps.times(values))


@kept
def open_cells(dependencies: Dependencies, kinds: bytes, uses: bytes) -> Lowered:
    """The walk of cells that send early and wait late. Lags are 0, that of a message, and nine delays of each kind.

    kinds: [cells] the kind of each cell, int64. uses: [kinds, 2] whether a kind depends on its two messages.
    A gradient leaves no sooner than an activation that its cell sends. Nobody asks for an output that nobody reads.
    """
    return _lowered(dependencies, kinds, uses)


def _lowered(dependencies: Dependencies, kinds: bytes, uses: bytes, gaps: Gaps | None = None) -> Lowered:
    kind = np.frombuffer(kinds, np.int64)
    code = np.frombuffer(uses, bool).reshape(-1, 2)[kind] @ np.array([1, 2])
    code += 4 * _read(dependencies, 0) + 8 * _read(dependencies, 1)
    code += 16 * (dependencies.sends_activation & (code >= 8))
    codes, form = distinct(code, 32)
    forms = [_form(each) for each in codes.tolist()] or [CLOSED]
    return lower(dependencies, forms, form, lag_row=(9 * kind).astype(np.int32), gaps=gaps)


def _read(dependencies: Dependencies, row: int) -> Bools:
    """[cells] whether a cell waits for the output of the forward (row 0) or of the backward (row 1) of each."""
    read = np.zeros(len(dependencies) + 1, bool)
    read[dependencies.producers[row]] = True
    return read[:-1]


def _form(code: int) -> CellInstructions:
    """The form of a cell. Bits: it depends on two messages; two outputs are read; the gradient leaves last."""
    steps: list[CellInstruction] = []
    arrivals = [(FREE, 0)]
    for way, read in ((1, INPUT), (2, GRADIENT)):
        if code & way:
            arrivals.append((len(steps), way))
            steps.append(CellInstruction(MAX, ((read, 0),)))
    outs = [0, 0, 0]
    for output in (output for output in (1, 2, 0) if not output or code & 2 << output):
        outs[output] = len(steps)
        steps.append(CellInstruction(MAX, tuple((read, LATENCY + 1 + 3 * output + way) for read, way in arrivals)))
    if code & 16:
        steps.append(CellInstruction(MAX, ((outs[1], 0), (outs[2], 0))))
        outs[2] = len(steps) - 1
    return CellInstructions(tuple(steps), (outs[0], outs[1], outs[2]))
