"""Measured steps as times of a walk: each cell's own time, what the host does around it, and latencies of messages.

    rank free = end of the cell before + host before            (first cell: when the rank began)
    arrival   = end of the producer + post + transit
    end       = max(rank free, arrivals) + host after + body + uneven experts + interruptions
    step      = the last end of a rank's last cell + copies behind it

Copies that are started or joined in front of a cell are beside the host's time, before or after.
A wait that blocked tells the transit: from the later of send and receive to the end of the wait. Where the receive
came later, this time belongs to the rank's own clock (``exposed``). A message that nobody waited for takes what
another one of its link took, in turn, at most until its reader looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from schedc.diagnose.measured_steps import MeasuredSteps
from schedc.ir.arrays import Bools, Floats, Int64
from schedc.step.dependencies import Dependencies
from schedc.step.measured import measured_makespans

_MOST_NUMBERS = 1 << 25
"""Cells and inputs times columns that are run at once."""
_BLOCKED = 0.05, 0.01, 3.0
"""A wait that took longer than each of these blocked: ms, share of a median cell, times the usual pause of a rank."""
_LEAST = 1e-12
"""Milliseconds below which copies are none."""
_ALONE = 5.0
"""On a link without waits that surely blocked: so many times its length a wait may come behind the message."""


@dataclass(frozen=True, eq=False)
class StepParts:
    """Parts of the time of S steps, in ms.

    body: [S, cells] compute. off_core, collecting: [S, cells] its interruptions (`CellRun`). after: [S, cells] host
    time between the last wait and the compute. before: [S, cells] host time between the cell before and the wait.
    exposed: [S, cells] transfers that began when the receive was posted.
    post: [S, inputs] from the end of the producer to its send. transit: [S, inputs] from there to the arrival.
    release: [S, P] when each rank began.
    uneven: [S, cells] what compute takes longer because experts have uneven rows (`uneven_times`).
    snapshots, offloads: [S, 3, cells] as in `ExposedCopies`. closing: [S, cells] host time beside copies that are
    behind a rank's last cell.
    """

    body: Floats
    off_core: Floats
    collecting: Floats
    after: Floats
    before: Floats
    exposed: Floats
    post: Floats
    transit: Floats
    release: Floats
    uneven: Floats
    snapshots: Floats
    offloads: Floats
    closing: Floats

    def scaled(self, factors: dict[str, Floats | float]) -> StepParts:
        """The same step with some parts multiplied. factors: [shape of the field] or a number, by field."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def rows(self, chosen: Int64) -> StepParts:
        """The parts of some steps."""
        return StepParts(*(getattr(self, each.name)[chosen] for each in fields(self)))


@dataclass(frozen=True, eq=False)
class Replay:
    """Measured steps as parts. known: [S, inputs] whether a blocked wait tells the transit of a message."""

    steps: MeasuredSteps
    parts: StepParts
    known: Bools

    @property
    def dependencies(self) -> Dependencies:
        return self.steps.dependencies

    def makespans(self, *many: StepParts) -> Floats:
        """[parts, S] the time of every step under each of the parts, in one walk."""
        return replayed_times(self.steps, many)

    @property
    def residual(self) -> Floats:
        """[S] how far the replayed time of each step is from the measured one, as a share of it."""
        return np.asarray(self.makespans(self.parts)[0] / self.steps.makespan - 1)


def replayed_times(steps: MeasuredSteps, many: Sequence[StepParts]) -> Floats:
    """[parts, S] the time of every step under each of the parts."""
    dependencies, inputs = steps.dependencies, steps.sends.inputs
    first = inputs.way == -1
    cell, rank = inputs.reader[first], dependencies.rank[inputs.reader[first]]
    begins = inputs.producer[first] < 0
    width = max(1, _MOST_NUMBERS // max(1, len(dependencies) + inputs.reader.size))
    columns = [(part, low) for part in many for low in range(0, part.body.shape[0], width)]
    results: list[Floats] = []
    batch: list[tuple[Floats, Floats, Floats]] = []

    def flush() -> None:
        if batch:
            results.append(
                measured_makespans(
                    dependencies, inputs, *(np.concatenate(each, axis=1) for each in zip(*batch, strict=True))
                )
            )
            batch.clear()

    taken = 0
    for part, low in columns:
        own = part.rows(np.arange(low, min(low + width, part.body.shape[0])))
        lag = own.post + own.transit
        copies = own.snapshots + own.offloads
        lag[:, first] = own.before[:, cell] + own.exposed[:, cell] + np.where(begins, own.release[:, rank], 0.0)
        lag[:, first] += copies[:, 0, cell]
        body = own.body + own.uneven + own.off_core + own.collecting + own.after + copies[:, 1]
        if taken + own.body.shape[0] > width:
            flush()
            taken = 0
        batch.append((body.T, lag.T, (own.closing + copies[:, 2]).T))
        taken += own.body.shape[0]
    flush()
    return np.concatenate(results).reshape(len(many), -1)


def replay_of(steps: MeasuredSteps) -> Replay:
    """The parts of measured steps."""
    known, inputs, sends = steps.dependencies, steps.sends.inputs, steps.sends
    there = np.flatnonzero(inputs.message)
    reader, way, producer = inputs.reader[there], inputs.way[there], inputs.producer[there]
    sent = steps.sent[:, way, reader]
    sent = np.where(np.isnan(sent), steps.end[:, producer], sent)
    posted = steps.posted[:, way, reader]
    ready = np.fmax(sent, posted)
    last = _last_of_reader(reader, ready, len(known))
    wait, waited = steps.wait[:, reader], steps.waited[:, reader]
    link = known.rank[producer] * np.int64(known.rank_start.size) + known.rank[reader]
    links = [np.flatnonzero(link == number) for number in np.unique(link)]
    blocked = last & (sent > wait)
    some = last & ~blocked & (waited - wait > _least_wait(steps))
    for own in links:  # a message that came long before the rank looked did not block it
        sure = (waited - ready)[:, own][blocked[:, own]]
        longest = sure.max() if sure.size else _ALONE * (waited - wait)[:, own]
        blocked[:, own] |= some[:, own] & ((wait - ready)[:, own] <= longest)
    late = blocked & (np.nan_to_num(posted, nan=-np.inf) > sent)
    transit = np.where(blocked, np.maximum(waited - ready, 0.0), 0.0)
    usual = np.zeros(transit.shape)
    for own in links:
        if blocked[:, own].any():
            usual[:, own] = np.resize(transit[:, own][blocked[:, own]], usual[:, own].shape)
    transit = np.where(blocked, transit, np.minimum(usual, np.maximum(wait - sent, 0.0)))
    parts = _parts(steps, reader, blocked, late, sent + transit)
    post, whole = np.zeros((2, steps.end.shape[0], inputs.reader.size))
    post[:, there], whole[:, there] = sent - steps.end[:, producer], transit
    taken = np.minimum(sends.posted, sends.end)
    ended = np.where(sends.producer >= 0, steps.end[:, sends.producer], 0.0)
    post[:, sends.row], whole[:, sends.row] = taken - ended, np.where(sends.blocked, sends.end - taken, 0.0)
    tells = np.zeros(whole.shape, bool)
    tells[:, there] = blocked
    return Replay(steps, replace(parts, post=post, transit=whole), tells)


def _least_wait(steps: MeasuredSteps) -> float:
    """Milliseconds above which a wait blocked. Cells without messages show the usual pause of a rank between cells."""
    alone = ~steps.dependencies.remote.any(axis=0)
    usual = float(np.median((steps.waited - steps.wait)[:, alone])) if alone.any() else 0.0
    return max(_BLOCKED[0], _BLOCKED[1] * float(np.median(steps.end - steps.begin)), _BLOCKED[2] * usual)


def _parts(steps: MeasuredSteps, reader: Int64, blocked: Bools, late: Bools, arrival: Floats) -> StepParts:
    """The parts on the ranks' own clocks; those of messages are left empty. arrival: [S, messages] ms."""
    known = steps.dependencies
    free = np.take_along_axis(steps.release, np.broadcast_to(known.rank, steps.end.shape).astype(np.int64), axis=1)
    behind = known.previous >= 0
    free[:, behind] = steps.end[:, known.previous[behind]]
    waits, exposes = np.zeros((2, *steps.end.shape), bool)
    np.logical_or.at(waits.T, reader, blocked.T)
    np.logical_or.at(exposes.T, reader, late.T)
    looked = np.maximum(steps.wait, free)
    held_back, last = _blocked_sends(steps)
    held = last > np.where(waits, steps.waited, -np.inf)  # a wait for a send is the last thing that blocked
    before = np.maximum(np.where(held, np.minimum(last, looked), looked) - free - held_back, 0.0)
    ready = np.where(held, last, np.where(waits, steps.waited, looked))
    np.maximum.at(ready.T, reader, arrival.T)  # behind a wait for a send a message may have come, too
    after = np.maximum(steps.begin - ready, 0.0)
    room = np.stack([before, after, steps.copies.behind], axis=1)
    copies = np.stack([steps.copies.snapshots, steps.copies.offloads])
    copies *= np.minimum(1.0, room / np.maximum(copies.sum(axis=0), _LEAST))
    before, after, closing = np.moveaxis(room - copies.sum(axis=0), 1, 0)
    exposed = np.where(exposes, np.maximum(steps.waited - looked, 0.0), 0.0)
    empty = np.zeros((steps.end.shape[0], 0))
    length = steps.end - steps.begin
    off_core = np.minimum(steps.off_core, length)
    collecting = np.minimum(steps.collecting, length - off_core)
    uneven = np.minimum(steps.uneven, length - off_core - collecting)
    body = length - off_core - collecting - uneven
    own = body, off_core, collecting, after, before, exposed
    return StepParts(*own, empty, empty, steps.release, uneven, copies[0], copies[1], closing)


def _blocked_sends(steps: MeasuredSteps) -> tuple[Floats, Floats]:
    """[S, cells] how long waits for sends blocked in front of a cell, and the end of the last; -inf: none did."""
    sends = steps.sends
    time, last = np.zeros(steps.end.shape), np.full(steps.end.shape, -np.inf)
    np.add.at(time.T, sends.cell, np.where(sends.blocked, sends.end - sends.begin, 0.0).T)
    np.maximum.at(last.T, sends.cell, np.where(sends.blocked, sends.end, -np.inf).T)
    return time, last


def _last_of_reader(reader: Int64, ready: Floats, cells: int) -> Bools:
    """[S, messages] whether a message is the last one that its reader waits for."""
    latest = np.full((ready.shape[0], cells), -np.inf)
    np.maximum.at(latest.T, reader, ready.T)
    return np.asarray(ready >= latest[:, reader])
