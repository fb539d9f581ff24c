"""Writes the predicted timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

The format: "Trace Event Format", Google, JSON object form. Each rank is a process with two tracks, one for forwards and
one for backwards and weight gradients. So the two halves of an overlapped pair are one above the other. A counter shows
the activations that the rank holds. A unit of cost is a millisecond. An arrow leads from the op that sends a
message to the op that waits for it. Each lane of works that a rank uses is a track more, and so are the times that the
rank stands at JOINs. Where copies of experts travel inside cells, times are those from inside cells. The exchanges of
copies have tracks of their links.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from schedc.cell.graph import LINKS
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule
from schedc.ir.works import FACTS, LANE_NAMES, WorkLane, WorkRow
from schedc.plan.price_cells import price_cells
from schedc.source import NOWHERE
from schedc.step.cells.copies_in_step import copies_in_step
from schedc.step.copy_runs import CopyRuns
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import Memory, measure_memory, without
from schedc.step.timeline import Timeline, simulate
from schedc.step.work_runs import WorkRuns

_UNIT = 1000.0
"""Microseconds, the format's unit, per unit of cost."""

_TRACKS = ("forward", "backward")
_DIGITS = 6
_LANE = len(_TRACKS)
"""Track of the first lane of works."""
_JOINS = _LANE + len(WorkLane)
"""Track of the times that a rank stands at JOINs."""
_LINK = _JOINS + 1
"""Track of the first link on which copies of experts travel."""

Event = dict[str, Any]


def export(schedule: Schedule, costs: Costs, works: WorkRuns | None = None) -> str:
    """The target ``trace``: the timeline that the costs predict; see `to_trace`."""
    dependencies = Dependencies.of(schedule)
    memory = measure_memory(schedule, costs, dependencies)
    inside = price_cells(dependencies, costs) if works is None and schedule.plan.copies_experts else None
    if inside is not None and (copies := copies_in_step(inside)) is not None:
        return to_trace(schedule, copies.timeline, memory, copies=copies)
    if works is None:
        return to_trace(schedule, simulate(schedule, costs, dependencies), memory)
    return to_trace(schedule, works.timeline(float(costs.p2p)), without(memory, works.placed), works)


def to_trace(
    schedule: Schedule,
    timeline: Timeline,
    memory: Memory,
    works: WorkRuns | None = None,
    copies: CopyRuns | None = None,
) -> str:
    """The trace as JSON text; ends with a newline."""
    events = [*_headers(schedule.ranks), *_ops(schedule, timeline)]
    events += _works(works) if works is not None else []
    events += _copies(copies) if copies is not None else []
    events += [*_counters(timeline, memory, works), *_arrows(timeline)]
    facts = {"schedule": schedule.name, "unit": "1 ms is 1 unit of cost", "makespan": timeline.makespan}
    sizes = {name: value for name, value in schedule.sizes.items() if name not in facts}
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**facts, **sizes}}
    return json.dumps(document, separators=(",", ":")).replace("},{", "},\n{") + "\n"


def _headers(ranks: int) -> list[Event]:
    """The events that name the processes and the tracks."""
    events: list[Event] = []
    for rank in range(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
            for track, name in enumerate(_TRACKS)
        ]
    return events


def _ops(schedule: Schedule, timeline: Timeline) -> list[Event]:
    """One complete event per op. The two ops of a pair begin and end together."""
    cell = timeline.dependencies.cell_of
    start = (timeline.start[cell] * _UNIT).round(_DIGITS).tolist()
    length = ((timeline.end - timeline.start)[cell] * _UNIT).round(_DIGITS).tolist()
    file = schedule.source.name if schedule.source else ""
    columns = (schedule.rank, schedule.kind, schedule.stage, schedule.microbatch, schedule.pair, schedule.phase,
               schedule.span)  # fmt: skip
    events = []
    for row, (rank, kind, stage, microbatch, pair, phase, span) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        facts: Event = {"stage": stage, "microbatch": microbatch}
        if pair >= 0:
            facts["overlapped"] = True
        if schedule.phases[phase]:
            facts["phase"] = schedule.phases[phase]
        if schedule.spans[span] != NOWHERE:
            facts["source"] = f"{file}:{schedule.spans[span]}"
        name, track = f"{stage}{LETTERS[kind]}{microbatch}", int(kind != OpKind.F)
        events.append(_slice(name, LETTERS[kind], (rank, track), (start[row], length[row]), facts))
    return events


def _works(works: WorkRuns) -> Iterator[Event]:
    """The tracks of lanes, one complete event per work, and one per time that a rank stands at a JOIN."""
    tracks = {(rank, _LANE + lane): LANE_NAMES[lane] for rank, lane in zip(*_homes(works), strict=True)}
    tracks |= {(int(works.rank[row]), _JOINS): "at JOINs" for row, _begin, _finish in works.waits}
    for (rank, track), name in sorted(tracks.items()):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
    begin, finish = works.times.begin.tolist(), works.times.finish.tolist()
    for row, (rank, lane) in enumerate(zip(*_homes(works), strict=True)):
        work = works.works.work(row)
        facts = {
            "stage": work.stage,
            "microbatch": work.microbatch,
            "bytes" if works.in_bytes else "memory": work.bytes,
            "exposed": float(works.times.exposed[row]),
        }
        yield _slice(_name(work), LANE_NAMES[lane], (rank, _LANE + lane), _during(begin[row], finish[row]), facts)
    for row, start, end in works.waits:
        name = f"JOIN {_name(works.works.work(row))}"
        yield _slice(name, "exposed", (int(works.rank[row]), _JOINS), _during(start, end))


def _copies(copies: CopyRuns) -> Iterator[Event]:
    """The tracks of links, and one complete event per exchange of copies."""
    lanes = copies.lane.tolist()
    for rank, lane in sorted(set(zip(copies.rank.tolist(), lanes, strict=True))):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": _LINK + lane, "args": {"name": LINKS[lane]}}
    begin, finish, exposed = (column.tolist() for column in (copies.begin, copies.finish, copies.exposed))
    for row, lane in enumerate(lanes):
        home = int(copies.rank[row]), _LINK + lane
        facts = {"exposed": exposed[row]}
        yield _slice(copies.name(row), LINKS[lane], home, _during(begin[row], finish[row]), facts)


def _homes(works: WorkRuns) -> tuple[list[int], list[int]]:
    """[works] rank and lane of each."""
    return works.rank.tolist(), works.works.lane.tolist()


def _name(work: WorkRow) -> str:
    return f"{FACTS[work.kind].name} {work.stage}" + (f"F{work.microbatch}" if work.microbatch >= 0 else "")


def _during(start: float, end: float) -> tuple[float, float]:
    """Begin and length in microseconds. start, end: time units."""
    return round(start * _UNIT, _DIGITS), round((end - start) * _UNIT, _DIGITS)


def _slice(
    name: str, category: str, home: tuple[int, int], during: tuple[float, float], facts: Event | None = None
) -> Event:
    """A complete event. home: rank and track. during: begin and length in microseconds."""
    (rank, track), (start, length) = home, during
    event = {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": track, "ts": start, "dur": length}
    return event if facts is None else event | {"args": facts}


def _counters(timeline: Timeline, memory: Memory, works: WorkRuns | None) -> list[Event]:
    """Counter events of held activations, in chunks: the peak during an op at its start, the rest at its end."""
    dependencies = timeline.dependencies
    cells = np.arange(len(dependencies))
    behind = works.held_between(memory.activations, counted=True) if works is not None else memory.activations
    between = behind.round().astype(np.int64) - memory.pending_weight
    inside = memory.activations_inside - np.minimum(memory.pending_weight, memory.activations_inside)
    waiting = memory.activations_inside - inside
    events = []
    for times, held, pending in (
        (timeline.start, inside, waiting),
        (timeline.end, between, memory.pending_weight),
    ):
        ranks, microseconds = dependencies.rank[cells].tolist(), (times * _UNIT).round(_DIGITS).tolist()
        events += [
            {"ph": "C", "name": "held (chunks)", "pid": rank, "ts": time, "args": {"activations": a, "pending W": w}}
            for rank, time, a, w in zip(ranks, microseconds, held.tolist(), pending.tolist(), strict=True)
        ]
    return sorted(events, key=lambda event: (event["pid"], event["ts"]))


def _arrows(timeline: Timeline) -> list[Event]:
    """A flow event at both ends of every message, inside the op that sends and the op that needs it."""
    dependencies = timeline.dependencies
    row, consumer = np.nonzero(dependencies.remote)
    producer = dependencies.producers[row, consumer]
    events: list[Event] = []
    ends = (dependencies.rank, (timeline.end * _UNIT).round(_DIGITS), (timeline.start * _UNIT).round(_DIGITS))
    rank, end, start = (column.tolist() for column in ends)
    for number, (channel, sender, receiver) in enumerate(
        zip(row.tolist(), producer.tolist(), consumer.tolist(), strict=True)
    ):
        what = {"name": _TRACKS[channel], "cat": "message", "id": number, "tid": channel}
        events.append({"ph": "s", **what, "pid": rank[sender], "ts": end[sender]})
        events.append({"ph": "f", "bp": "e", **what, "pid": rank[receiver], "ts": start[receiver]})
    return events
