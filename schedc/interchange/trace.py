"""The predicted timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

The format: "Trace Event Format", Google, JSON object form. One process per rank with a track for forwards and one for
backwards and weight gradients, so that the two halves of an overlapped pair lie one above the other, and a counter of
what the rank holds. One unit of cost is one millisecond. An arrow leads from what a rank sends to what waits for it.
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
    found: list[Event] = []
    for rank in range(ranks):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        found += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
            for track, name in enumerate(_TRACKS)
        ]
    return found


def _ops(schedule: Schedule, timeline: Timeline) -> list[Event]:
    """One complete event per op; the two of a pair begin and end together."""
    cell = timeline.dependencies.cell_of
    start = (timeline.start[cell] * _UNIT).round(_DIGITS).tolist()
    length = ((timeline.end - timeline.start)[cell] * _UNIT).round(_DIGITS).tolist()
    file = schedule.source.name if schedule.source else ""
    columns = (schedule.rank, schedule.kind, schedule.stage, schedule.microbatch, schedule.pair, schedule.phase,
               schedule.span)  # fmt: skip
    found = []
    for at, (rank, kind, stage, microbatch, pair, phase, span) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        facts: Event = {"stage": stage, "microbatch": microbatch}
        if pair >= 0:
            facts["overlapped"] = True
        if schedule.phases[phase]:
            facts["phase"] = schedule.phases[phase]
        if schedule.spans[span] != NOWHERE:
            facts["source"] = f"{file}:{schedule.spans[span]}"
        found.append(
            {
                "ph": "X",
                "name": f"{stage}{LETTERS[kind]}{microbatch}",
                "cat": LETTERS[kind],
                "pid": rank,
                "tid": int(kind != OpKind.F),
                "ts": start[at],
                "dur": length[at],
                "args": facts,
            }
        )
    return found


def _counters(timeline: Timeline, memory: Memory) -> list[Event]:
    """What a rank holds, in chunks: at most inside a cell, from its start, and after it, from its end."""
    known = timeline.dependencies
    cells = np.arange(len(known))
    between = memory.activations - memory.pending_weight
    inside = memory.activations_inside - np.minimum(memory.pending_weight, memory.activations_inside)
    waiting = memory.activations_inside - inside
    found = []
    for times, held, pending in (
        (timeline.start, inside, waiting),
        (timeline.end, between, memory.pending_weight),
    ):
        columns = (known.rank[cells].tolist(), (times * _UNIT).round(_DIGITS).tolist(), held.tolist(), pending.tolist())
        found += [
            {"ph": "C", "name": "held (chunks)", "pid": rank, "ts": at, "args": {"activations": a, "pending W": w}}
            for rank, at, a, w in zip(*columns, strict=True)
        ]
    return sorted(found, key=lambda event: (event["pid"], event["ts"]))


def _arrows(timeline: Timeline) -> list[Event]:
    """A flow event at both ends of every message, inside the ops that make and take it."""
    known = timeline.dependencies
    row, consumer = np.nonzero(known.remote)
    producer = known.producers[row, consumer]
    found: list[Event] = []
    ends = (known.rank, (timeline.end * _UNIT).round(_DIGITS), (timeline.start * _UNIT).round(_DIGITS))
    rank, end, start = (column.tolist() for column in ends)
    for number, (channel, made, taken) in enumerate(
        zip(row.tolist(), producer.tolist(), consumer.tolist(), strict=True)
    ):
        what = {"name": _TRACKS[channel], "cat": "message", "id": number, "tid": channel}
        found.append({"ph": "s", **what, "pid": rank[made], "ts": end[made]})
        found.append({"ph": "f", "bp": "e", **what, "pid": rank[taken], "ts": start[taken]})
    return found
