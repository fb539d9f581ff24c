"""Reads traces of torch.profiler (`export_chrome_trace`), one file per rank of one pipeline.

The multi-stage schedules of torch.distributed.pipelining name each action: ``PP:0F3``. Single-stage ones name ``Forward
3`` and ``Backward 3``, or nothing. A range begins before the rank waits for its message; compute begins with the first
operation inside. Where the file has ranges of the device, these are the cells.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from schedc.diagnose.recording import CellRun, Key, Op, RankStep, RunRecording, cell_ops, message_end
from schedc.diagnose.trace_text import refuse, slices
from schedc.ir.ops import OpKind
from schedc.source import Source

_SINGLE = re.compile(r"(Forward|Backward) (\d{1,9})", re.ASCII)
_MEGATRON = re.compile(r"forward_step|backward_step|forward-compute|backward-compute|megatron|nvtx", re.IGNORECASE)
_LINKS = ("c10d::", "gloo:", "nccl:", "record_param_comms", "PP:")
"""Beginnings of the names of events that compute nothing."""

RECIPE = (
    "record one of torch's multi-stage schedules, or name the chunks of your own: "
    "`with torch.profiler.record_function(f'Forward {i}'): stage.forward_one_chunk(i, ...)`, and `Backward {i}` "
    "(docs/guide/diagnosis.md)"
)


class _NamedSpan(NamedTuple):
    begin: float
    end: float
    name: str


_Cells = list[tuple[_NamedSpan, tuple[Op, ...]]]


@dataclass
class _Events:
    """The events of one file, each list in order of time.

    waits: ends of receives whose wait blocks the host. ops: begins of operations that compute.
    """

    source: Source
    rank: int | None
    ranges: list[_NamedSpan] = field(default_factory=list)
    sends: list[_NamedSpan] = field(default_factory=list)
    receives: list[_NamedSpan] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    ops: list[float] = field(default_factory=list)
    device: bool = False


def read_kineto(documents: Sequence[tuple[Source, dict[str, Any]]]) -> RunRecording:
    """The steps of one pipeline. Ranks are in the order of their global ranks, else of the files.

    Raises `DiagnosticError`: S616 for files that name no microbatch, S617 for files that do not belong together.
    """
    files = [_events(source, document) for source, document in documents]
    known = [each.rank for each in files if each.rank is not None]
    if len(set(known)) < len(known):
        twice = next(rank for rank in known if known.count(rank) > 1)
        refuse(files[0].source, f"two files are of rank {twice}", help="pass each rank of one pipeline a single time")
    if len(known) == len(files):
        files.sort(key=lambda each: each.rank or 0)
    ranks = tuple(_steps(each, number) for number, each in enumerate(files))
    counts = {len(steps) for steps in ranks}
    if len(counts) > 1:
        few = min(range(len(ranks)), key=lambda rank: len(ranks[rank]))
        refuse(
            files[few].source,
            f"it has {len(ranks[few])} steps, another rank has {max(counts)}",
            help="let torch.profiler.schedule begin and end at the same steps on all ranks",
        )
    return RunRecording(files[0].source, ranks, "", "torch.profiler")


def _events(source: Source, document: dict[str, Any]) -> _Events:
    about = document.get("distributedInfo")
    rank = about.get("rank") if isinstance(about, dict) else None
    result = _Events(source, rank if type(rank) is int else None)
    host: dict[Any, list[_NamedSpan]] = defaultdict(list)
    device: list[_NamedSpan] = []
    ops: dict[Any, list[float]] = defaultdict(list)
    other = ""
    for event, begin, end in slices(document, source):
        name, category = event["name"], event.get("cat")
        if name.startswith("PP:") or _SINGLE.fullmatch(name):
            found = device if category == "gpu_user_annotation" else host[str(event.get("tid"))]
            found.append(_NamedSpan(begin, end, name))
        elif name.startswith("c10d::send"):
            result.sends.append(_NamedSpan(begin, end, name))
        elif name.startswith("c10d::recv"):
            result.receives.append(_NamedSpan(begin, end, name))
        elif name == "gloo:recv":
            result.waits.append(end)
        elif category == "cpu_op" and not name.startswith(_LINKS):
            ops[str(event.get("tid"))].append(begin)
        elif _MEGATRON.search(name):
            other = name
    if not host:
        said = f"its ranges (`{other[:60]}`) name no microbatch" if other else "no range names a microbatch"
        refuse(source, said, "ranges are `PP:0F3` (multi-stage schedules), `Forward 3`, `Backward 3`", help=RECIPE)
    thread = max(host, key=lambda tid: len(host[tid]))
    result.device = any(cell_ops(each.name[3:]) or _SINGLE.fullmatch(each.name) for each in device)
    result.ranges = sorted(host[thread])
    if result.device:
        names = {each.name for each in device}
        result.ranges = sorted([*device, *(each for each in result.ranges if each.name not in names)])
    result.ops = [] if result.device else sorted(ops[thread])
    result.sends.sort()
    result.receives.sort()
    result.waits.sort()
    return result


def _steps(events: _Events, rank: int) -> tuple[RankStep, ...]:
    """The steps of a rank: a step ends where its first op comes again."""
    cells: _Cells = []
    for each in events.ranges:
        if ops := _ops(each.name, rank):
            cells.append((each, ops))
    if not cells:
        refuse(events.source, "no range computes anything (`PP:0F3`, `Forward 3`)", help=RECIPE)
    first = [number for number, (_, ops) in enumerate(cells) if ops == cells[0][1]]
    size = first[1] if len(first) > 1 else len(cells)
    orders = [[ops for _, ops in cells[low : low + size]] for low in range(0, len(cells), size)]
    for number, order in enumerate(orders):
        if order != orders[0]:
            refuse(
                events.source,
                f"rank {rank} ran another order in step {number} of the trace than in the first",
                help="let the profiler begin and end between two steps",
            )
    result, before = [], float("-inf")
    for low in range(0, len(cells), size):
        behind = cells[low + size][0].begin if low + size < len(cells) else float("inf")
        result.append(_step(events, cells[low : low + size], before, behind))
        before = result[-1].cells[-1].end
    return tuple(result)


def _ops(name: str, rank: int) -> tuple[Op, ...] | None:
    if name.startswith("PP:"):
        found = cell_ops(name[3:])
        return found[0] if found else None
    way, microbatch = name.split(" ")
    return ((int(OpKind.F if way == "Forward" else OpKind.B), rank, int(microbatch)),)


def _step(events: _Events, cells: _Cells, before: float, behind: float) -> RankStep:
    """A step of one rank. before: end of the step before; behind: begin of the first cell of the next."""
    begin, last = cells[0][0].begin, cells[-1][0].end
    sent: dict[Key, float] = {}
    posted: dict[Key, float] = {}
    begins = [begin]
    for each in _between(events.ranges, before, behind):
        end = message_end(each.name.removeprefix("PP:"))
        if end is not None and end.verb == "SEND" and each.begin > begin:
            sent[end.key] = each.begin
        elif end is not None and end.verb == "RECV" and each.begin < last:
            posted[end.key] = each.begin
            begins.append(each.begin)
    runs: list[CellRun] = []
    for number, (span, ops) in enumerate(cells):
        free = runs[-1].end if runs else before
        start = _first(events, span)
        calls = [*_between(events.receives, free, start), *_between(events.sends, free, start)]
        wait = max([free, *(call.end for call in calls)])
        if events.device:
            wait = free if runs else min(begins)
        elif not span.name.startswith("PP:"):
            following = cells[number + 1][0].begin if number + 1 < len(cells) else behind
            _messages_of(events, ops[0], (free, start, following), sent, posted)
            begins += [time for time in posted.values() if not runs]
        else:
            wait = max(wait, span.begin)
        wait = span.begin if wait == float("-inf") else wait
        runs.append(CellRun(ops, min(wait, start), start, start, max(span.end, start)))
    # the host of a device runs ahead: when it posts says nothing of when data moves
    return RankStep(min(begins), tuple(runs), *(({}, {}) if events.device else (sent, posted)))


def _messages_of(
    events: _Events, op: Op, times: tuple[float, float, float], sent: dict[Key, float], posted: dict[Key, float]
) -> None:
    """Notes the messages of a cell of a single-stage schedule: a receive in front of it, a send in it or behind it.

    times: end of the cell before, begin of its compute, begin of the next range.
    """
    free, start, following = times
    kind, stage, microbatch = op
    way, step = (0, 1) if kind == OpKind.F else (1, -1)
    if posts := _between(events.receives, free, start):
        posted[way, stage, microbatch] = posts[0].begin
    if sends := _between(events.sends, start, following):
        sent[way, stage + step, microbatch] = sends[0].begin


def _first(events: _Events, span: _NamedSpan) -> float:
    """When compute begins inside a range: when its last receive is there, else with its first operation.

    A range of the host without operations only waited. One of the device, or of a trace without operations, computes
    from its begin.
    """
    if not events.ops:
        return span.begin
    place = bisect_left(events.ops, span.begin)
    begin = events.ops[place] if place < len(events.ops) and events.ops[place] < span.end else span.end
    ended = bisect_left(events.waits, begin)
    return max(span.begin, events.waits[ended - 1]) if ended and events.waits[ended - 1] > span.begin else begin


def _between(found: list[_NamedSpan], low: float, high: float) -> list[_NamedSpan]:
    """Ranges that begin in low ..< high."""
    return found[bisect_left(found, (low,)) : bisect_left(found, (high,))]
