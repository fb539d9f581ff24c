"""A traced step as a Chrome trace for Perfetto, as costs of ops and cells, and beside its predicted timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import LINKS
from schedc.cell.program import Action, Half, graph_of
from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.works import LANE_NAMES, WorkLane
from schedc.source import NOWHERE
from schedc.step.copy_runs import COPIES, copy_name
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import TIMES
from schedc.step.timeline import simulate
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Interval
from schedc_runtime.execute.instruction_names import batch_label, receives, sentence
from schedc_runtime.measure.stage_times import HALVES
from schedc_runtime.moe.traced_copies import CopySpan

Intervals = Mapping[int, Sequence[Interval]]
"""When each instruction of one step ran, by rank, in nanoseconds of one clock."""

_MILLISECOND = 1e6
_COMPUTE, _COMMUNICATION = 0, 1
_TRACKS = {_COMPUTE: "compute", _COMMUNICATION: "communication"}
_LANES = {len(_TRACKS) + lane: f"lane {LANE_NAMES[lane]}" for lane in WorkLane}
"""Tracks of works, by lane."""
_LINKS = {str(lane): (len(_TRACKS) + len(WorkLane) + at, f"lane {lane}") for at, lane in enumerate(LINKS)}
"""Track, and its name, of the links on which copies of experts travel."""
_COPIES = "hot."
"""What the names of exchanges of copies by microbatch begin with, behind the layer."""


def chrome_trace(program: Program, *steps: Intervals) -> dict[str, Any]:
    """Steps in the Trace Event Format (JSON object form), which Perfetto and chrome://tracing open.

    One process per rank, with a track for compute, one for communication, and one for each lane of the program's works.
    Times are microseconds from the first instruction. A START and a JOIN last as long as the rank takes for them. An
    arrow leads from each send to the end of the wait that received it. Each slice of several steps has the number of
    its step. An exchange of copies of experts has a slice from its start to its join, on the track of its links.
    """
    begin = begin_of(*steps)
    events = [event for rank in steps[0] for event in _headers(program, rank)]
    for number, step in enumerate(steps):
        which = number if len(steps) > 1 else -1
        events += [
            event for rank, spans in step.items() for x in spans for event in _events(program, rank, x, begin, which)
        ]
        events += [event for rank, spans in step.items() for event in _copy_events(program, rank, spans, begin, which)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schedule": program.name, **{name: str(size) for name, size in program.sizes.items()}},
    }


def begin_of(*steps: Intervals) -> int:
    """When the first instruction or exchange of copies of some steps began, in ns."""
    spans = [interval for step in steps for spans in step.values() for interval in spans]
    return min((start for x in spans for start in (x.start, *(copy[-2] for copy in x.copies))), default=0)


def measured_costs(program: Program, steps: Iterable[Intervals]) -> Costs:
    """Costs in milliseconds: the median time of each kind of op on each stage, over all ``steps``.

    A stage that never ran a kind takes the median of the stages that did (`trace_provenance`). A kind that no stage ran
    by itself is not ``given``. p2p is the median time from a send to the end of its wait. It counts only messages that
    were already waited for when they were sent.
    """
    steps = list(steps)
    costs = {
        kind: tuple(times.get(stage, median(times.values())) for stage in range(program.stages))
        for kind, times in _medians(program, steps).items()
        if kind in TIMES
    }
    latencies = [latency for intervals in steps for latency in _latencies(program, intervals)]
    measured: dict[str, Any] = {**costs, **({"p2p": max(0.0, median(latencies))} if latencies else {})}
    return Costs(**measured, given=frozenset(measured))


def trace_provenance(program: Program, steps: Iterable[Intervals]) -> Iterator[str]:
    """How each number of `measured_costs` came about, line by line."""
    steps = list(steps)
    yield f"{program.name}, {len(steps)} traced step{'s' if len(steps) != 1 else ''}: medians over microbatches."
    for kind, times in _medians(program, steps).items():
        if missing := [str(stage) for stage in range(program.stages) if stage not in times and kind in TIMES]:
            stages = f"stage{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            yield f"{kind} of {stages}: the median of the other stages, as none ran there by itself."
    if any(True for intervals in steps for _ in _latencies(program, intervals)):
        yield "p2p: the median from a send to the end of its wait, of messages that were waited for before."


def _medians(program: Program, steps: Iterable[Intervals]) -> dict[str, dict[int, float]]:
    """The median in milliseconds, by kind of op (``FB`` for a pair with a full backward) and by stage."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for intervals in steps:
        for row, interval in _compute_rows(program, intervals):
            kind = InstructionKind(int(program.kind[row]))
            name = "FB" if kind is InstructionKind.CELL and program.backward[row] == OpKind.B else kind.name
            times[name][int(program.stage[row])].append((interval.end - interval.start) / _MILLISECOND)
    return {name: {stage: median(runs) for stage, runs in stages.items()} for name, stages in times.items()}


@dataclass(frozen=True)
class TraceComparison:
    """A step as predicted and as measured, in milliseconds.

    predicted, measured: the makespan. predicted_busy, measured_busy: [ranks] the time that a rank computed.
    """

    predicted: float
    measured: float
    predicted_busy: tuple[float, ...]
    measured_busy: tuple[float, ...]

    def table(self) -> str:
        """Both side by side: a line per rank with its compute, and one with the makespan."""
        pairs = zip(self.predicted_busy, self.measured_busy, strict=True)
        rows = [(f"rank {rank} computes", a, b) for rank, (a, b) in enumerate(pairs)]
        rows.append(("makespan", self.predicted, self.measured))
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{name:>{width}} {a:>9.2f} ms {b:>9.2f} ms" for name, a, b in rows]
        return "\n".join([f"{'':>{width}} {'predicted':>12} {'measured':>12}", *lines])


def compare_traces(program: Program, costs: Costs, intervals: Intervals) -> TraceComparison:
    """The timeline that ``costs`` (milliseconds) predict for the program, beside that of a traced step."""
    timeline = simulate(computation(program)[0], costs)
    spans = [interval for _, interval in _compute_rows(program, intervals)]
    busy = dict.fromkeys(range(program.ranks), 0.0)
    for row, interval in _compute_rows(program, intervals):
        busy[int(program.rank[row])] += (interval.end - interval.start) / _MILLISECOND
    makespan = max(s.end for s in spans) - min(s.start for s in spans) if spans else 0
    return TraceComparison(
        timeline.makespan, makespan / _MILLISECOND, tuple(timeline.busy.tolist()), tuple(busy.values())
    )


def _compute_rows(program: Program, intervals: Intervals) -> Iterator[tuple[int, Interval]]:
    """Each compute instruction, from the start of its first micro-step to the end of its last.

    The time in which it waits for a message inside is cut off at its start.
    """
    for spans in intervals.values():
        whole: dict[int, Interval] = {}
        waited = 0
        for interval in spans:
            if program.kind[interval.row] <= InstructionKind.CELL:
                before = whole.get(interval.row, interval._replace(start=interval.start - waited))
                whole[interval.row] = before._replace(start=before.start + waited, end=interval.end, part="")
                waited = 0
            elif program.kind[interval.row] == InstructionKind.WAIT:
                waited += interval.end - interval.start
        yield from whole.items()


def _latencies(program: Program, intervals: Intervals) -> list[float]:
    """Milliseconds from a send to the end of its wait, of each message that was waited for before it was sent."""
    sent: dict[int, int] = {}
    waited: dict[int, Interval] = {}
    for interval in (interval for spans in intervals.values() for interval in spans):
        for row in range(interval.row, interval.row + interval.rows):
            message, kind = int(program.message[row]), program.kind[row]
            if kind == InstructionKind.SEND:
                sent[message] = interval.start
            elif kind == InstructionKind.WAIT and receives(program, row):
                waited[message] = interval
    return [
        (wait.end - sent[message]) / _MILLISECOND
        for message, wait in waited.items()
        if message in sent and wait.start < sent[message]
    ]


def _headers(program: Program, rank: int) -> list[dict[str, Any]]:
    """The names of a rank's process and of its tracks."""
    named: Callable[..., dict[str, Any]] = lambda what, name, **more: {  # noqa: E731
        "ph": "M", "pid": rank, "name": what, "args": {"name": name}, **more,
    }  # fmt: skip
    mine = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    used = {_track(program, row) for row in (mine.start + np.flatnonzero(program.work[mine] >= 0)).tolist()}
    names = _TRACKS | {track: name for track, name in _LANES.items() if track in used}
    tracks = [named("thread_name", name, tid=track) for track, name in names.items()]
    return [named("process_name", f"rank {rank}"), *tracks]


def _track(program: Program, row: int) -> int:
    if program.work[row] >= 0:
        return len(_TRACKS) + int(program.works.lane[program.work[row]])
    return _COMPUTE if program.kind[row] <= InstructionKind.CELL else _COMMUNICATION


def _events(program: Program, rank: int, interval: Interval, begin: int, step: int) -> Iterator[dict[str, Any]]:
    """One slice per interval, with an arrow's end for each message. A batch of messages is one slice."""
    row = interval.row
    track = _track(program, row)
    rows = range(row, row + interval.rows)
    start, end = (interval.start - begin) / 1000, (interval.end - begin) / 1000
    where = {"pid": rank, "tid": track}
    name = batch_label(program, row, interval.rows, interval.part)
    yield {"ph": "X", "name": name, "ts": start, "dur": end - start, **where,
           "args": _arguments(program, interval, step)}  # fmt: skip
    for r in rows:
        message = int(program.message[r]) + max(step, 0) * len(program)
        flow = {"name": "message", "cat": "message", "id": message, **where}
        if program.kind[r] == InstructionKind.SEND:
            yield {"ph": "s", "ts": start, **flow}
        elif program.kind[r] == InstructionKind.WAIT and receives(program, r):
            yield {"ph": "f", "bp": "e", "ts": end, **flow}


def _copy_events(
    program: Program, rank: int, spans: Sequence[Interval], begin: int, step: int
) -> Iterator[dict[str, Any]]:
    """A slice per exchange of copies, behind the names of the tracks that they use."""
    if program.plan.balance is not None and program.plan.balance.in_place:
        return  # copies stay at home
    copies = [CopySpan(*each) for x in spans for each in x.copies] + list(_copies_by_microbatch(program, spans))
    if step <= 0:
        for lane in dict.fromkeys(copy.lane for copy in copies):
            track, name = _LINKS[lane]
            yield {"ph": "M", "pid": rank, "name": "thread_name", "args": {"name": name}, "tid": track}
    for lane, gradients, stage, layer, microbatch, start, end in copies:
        yield {"ph": "X", "name": copy_name(gradients, stage, layer, microbatch), "cat": COPIES,
               "ts": (start - begin) / 1000, "dur": (end - start) / 1000, "pid": rank, "tid": _LINKS[lane][0],
               "args": {"step": step} if step >= 0 else {}}  # fmt: skip


def _copies_by_microbatch(program: Program, spans: Sequence[Interval]) -> Iterator[CopySpan]:
    """The exchanges of copies that are micro-steps, each from its start to the end of its wait."""
    started: dict[tuple[int, TracedStep], int] = {}
    for x in spans:
        step = TracedStep.parse(x.part)
        if step is None or not step.role.startswith(_COPIES):
            continue
        key = x.row, step._replace(action=Action.START)
        if step.action is Action.START:
            started[key] = x.start
        elif key in started:
            row = program.instruction(x.row)
            stage, microbatch = graph_of(row.kind_name, step.half, (row.stage, row.microbatch), row.last_slot)
            of_layer = step.half is Half.WEIGHT, stage, step.layer, microbatch
            yield CopySpan(step.role.removeprefix(_COPIES), *of_layer, started.pop(key), x.end)


def _arguments(program: Program, interval: Interval, step: int) -> dict[str, Any]:
    row = interval.row
    x = program.instruction(row)
    span = program.spans[program.span[row]]
    values = {
        "what": sentence(program, row), "stage": x.stage, "microbatch": x.microbatch,
        "backward stage": x.stage2, "backward microbatch": x.microbatch2, "peer": x.peer, "message": x.message,
        "phase": program.phases[program.phase[row]], "source": program.where(row) if span != NOWHERE else "",
        "step": step,
    }  # fmt: skip
    if interval.loads:
        values["expert rows"] = [list(rows) for rows in interval.loads]
    lost = {"off core us": interval.off_core / 1000, "garbage collection us": interval.collecting / 1000}
    return {name: value for name, value in values.items() if value not in (-1, "")} | {
        name: time for name, time in lost.items() if time
    }


class TracedStep(NamedTuple):
    """A micro-step on a node. role: of a segment ``experts``, of an exchange ``dispatch.rail``; layer: -1 for none."""

    action: Action
    half: Half
    layer: int
    role: str

    @classmethod
    def parse(cls, text: str) -> TracedStep | None:
        """Reads the label of a `BoundStep`; None where it is no micro-step on a node."""
        what, of, name = text.partition(" of ")
        if not of:
            return None
        action, half = what.split()
        layer, _, role = name.partition(".")
        return cls(Action(action), Half(half), int(layer), role) if role else cls(Action(action), Half(half), -1, name)


Times = dict[tuple[str, Half], list[float]]
"""Milliseconds of every run, by role and half."""


def measured_cell_costs(steps: Iterable[Intervals], *replicas: Iterable[Intervals]) -> CellCosts:
    """Times in milliseconds by role: the median over layers, microbatches, ranks and steps.

    steps: the intervals of each traced step, by rank (`Pipeline.trace`). They must have run in the order
    `schedc.cell.serial.serial`. replicas: the same steps on other ranks of the expert group (`Pipeline.intervals`).
    The last rank to start an exchange waits for no fuller rank. So an exchange takes the least time, from its start to
    the end of its wait, among those given. Raises `RuntimeFault` for steps in another order, and for replicas that
    differ.

    The attention behind another MoE layer also ends that layer: only an attention at a stage's beginning counts.
    """
    segments: Times = defaultdict(list)
    exchanges: Times = defaultdict(list)
    traces = [list(each) for each in (steps, *replicas)]
    if len({len(each) for each in traces}) > 1:
        raise RuntimeFault("the replicas traced other numbers of steps", "trace the same steps on all of them")
    for together in zip(*traces, strict=True):
        for rank in together[0]:
            _add([list(_timed(intervals.get(rank, ()))) for intervals in together], segments, exchanges)
    if not segments:
        help = "only stages with expert layers, or of a Cut(segmented=True), do"
        raise RuntimeFault("the traced steps have no cells", help)
    return CellCosts.of(_segment_times(segments), _segment_times(exchanges))


def _timed(spans: Sequence[Interval]) -> Iterator[tuple[TracedStep, float]]:
    """Segments and waits of one rank's step, and milliseconds: of a wait, since its exchange was started."""
    started: Interval | None = None
    for interval in spans:
        if (step := TracedStep.parse(interval.part)) is None:
            continue
        if started is not None and step.action is not Action.WAIT:
            raise RuntimeFault("costs are measured with one exchange after the other", "pass cells=serial")
        begin = interval.start if started is None else started.start
        started = interval if step.action is Action.START else None
        if started is None:
            yield step, (interval.end - begin) / 1e6


def _add(replicas: Sequence[list[tuple[TracedStep, float]]], segments: Times, exchanges: Times) -> None:
    """Add the times of one rank's step, traced by every replica."""
    if any([step for step, _ in each] != [step for step, _ in replicas[0]] for each in replicas[1:]):
        raise RuntimeFault("the replicas ran other micro-steps", "trace the same steps on all ranks of an expert group")
    for same in zip(*replicas, strict=True):
        step, times = same[0][0], [time for _, time in same]
        if step.action is Action.WAIT:
            exchanges[step.role, step.half].append(min(times))
        elif step.role != "attention" or step.layer == 0:
            segments[step.role, step.half] += times


def _segment_times(times: Mapping[tuple[str, Half], list[float]]) -> dict[str, SegmentTimes]:
    """The median of each role and half; a half that never ran takes no time."""
    roles = dict.fromkeys(role for role, _ in times)
    return {role: SegmentTimes(*(median(times.get((role, half), [0.0])) for half in HALVES)) for role in roles}
