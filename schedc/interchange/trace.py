"""Writes the predicted timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

The format: "Trace Event Format", Google, JSON object form. Each rank is a process with two tracks, one for forwards and
one for backwards and weight gradients. So the two halves of an overlapped pair are one above the other. A counter shows
the activations that the rank holds. One unit of cost is one millisecond. An arrow leads from the op that sends a
message to the op that waits for it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import Memory, measure_memory
from schedc.analysis.timeline import Timeline, simulate
from schedc.cost.costs import Costs
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule
from schedc.source import NOWHERE

_UNIT = 1000.0
"""Microseconds, the format's unit, per unit of cost."""

_TRACKS = ("forward", "backward")
_DIGITS = 6

Event = dict[str, Any]


def export(schedule: Schedule, costs: Costs) -> str:
    """The target ``trace``: the timeline that the costs predict; see `to_trace`."""
    dependencies = Dependencies.of(schedule)
    memory = measure_memory(schedule, costs, dependencies)
    return to_trace(schedule, simulate(schedule, costs, dependencies), memory)


def to_trace(schedule: Schedule, timeline: Timeline, memory: Memory) -> str:
    """The trace as JSON text; ends with a newline."""
    events = [*_headers(schedule.ranks), *_ops(schedule, timeline), *_counters(timeline, memory), *_arrows(timeline)]
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
        events.append(
            {
                "ph": "X",
                "name": f"{stage}{LETTERS[kind]}{microbatch}",
                "cat": LETTERS[kind],
                "pid": rank,
                "tid": int(kind != OpKind.F),
                "ts": start[row],
                "dur": length[row],
                "args": facts,
            }
        )
    return events


def _counters(timeline: Timeline, memory: Memory) -> list[Event]:
    """Counter events of held activations, in chunks: the peak during an op at its start, the rest at its end."""
    dependencies = timeline.dependencies
    cells = np.arange(len(dependencies))
    between = memory.activations - memory.pending_weight
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
