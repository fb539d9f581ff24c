"""What a traced step tells: a Chrome trace for Perfetto, measured costs, and the makespan beside the predicted one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from schedc.analysis.timeline import simulate
from schedc.cell.program import Action, Half
from schedc.cost.costs import Costs
from schedc.cost.keys import TIMES
from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind, Program, computation
from schedc.source import NOWHERE
from schedc_runtime.execute.executor import Interval
from schedc_runtime.execute.instruction_names import label, receives, sentence

Intervals = Mapping[int, Sequence[Interval]]
"""Of one step: per rank, when each instruction ran, in nanoseconds of one clock."""

_MILLISECOND = 1e6
_COMPUTE, _COMMUNICATION = 0, 1
_TRACKS = {_COMPUTE: "compute", _COMMUNICATION: "communication"}


class TracedStep(NamedTuple):
    """A micro-step on a node, as traces name it. role: of a segment ``experts``, of an exchange ``dispatch.rail``."""

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


def chrome_trace(program: Program, intervals: Intervals) -> dict[str, Any]:
    """The step in the Trace Event Format (JSON object form), which Perfetto and chrome://tracing open.

    One process per rank, with a track for compute and one for communication; times in microseconds from the first
    instruction. An arrow leads from each send to the end of the wait that received it.
    """
    begin = min((interval.start for spans in intervals.values() for interval in spans), default=0)
    events = [event for rank in intervals for event in _headers(rank)]
    for rank, spans in intervals.items():
        for interval in spans:
            events += _events(program, rank, interval, begin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schedule": program.name, **{name: str(size) for name, size in program.sizes.items()}},
    }


def measured_costs(program: Program, steps: Iterable[Intervals]) -> Costs:
    """Costs in milliseconds: per stage the median time of each kind of op, over all ``steps``.

    A stage that never ran a kind gets the median of the stages that did, see `provenance`. A kind that no stage ran by
    itself is not ``given``. p2p is the median time from a send to the end of its wait, of those messages that were
    already waited for.
    """
    steps = list(steps)
    lanes = {
        kind: tuple(times.get(stage, median(times.values())) for stage in range(program.stages))
        for kind, times in _medians(program, steps).items()
        if kind in TIMES
    }
    latencies = [latency for intervals in steps for latency in _latencies(program, intervals)]
    measured: dict[str, Any] = {**lanes, **({"p2p": max(0.0, median(latencies))} if latencies else {})}
    return Costs(**measured, given=frozenset(measured))


def provenance(program: Program, steps: Iterable[Intervals]) -> Iterator[str]:
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
    """By kind of op, ``FB`` for a pair with a full backward, and by stage: the median in milliseconds."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for intervals in steps:
        for row, interval in _compute_rows(program, intervals):
            kind = InstructionKind(int(program.kind[row]))
            name = "FB" if kind is InstructionKind.CELL and program.backward[row] == OpKind.B else kind.name
            times[name][int(program.stage[row])].append((interval.end - interval.start) / _MILLISECOND)
    return {name: {stage: median(taken) for stage, taken in stages.items()} for name, stages in times.items()}


@dataclass(frozen=True)
class TraceComparison:
    """Predicted and measured, in milliseconds: the makespan, and per rank the time that it computed."""

    predicted: float
    measured: float
    predicted_busy: tuple[float, ...]
    measured_busy: tuple[float, ...]

    def table(self) -> str:
        """Both side by side, a line per rank and one for the step."""
        lines = [f"{'':>10} {'predicted':>12} {'measured':>12}"]
        pairs = zip(self.predicted_busy, self.measured_busy, strict=True)
        lines += [f"{f'rank {rank}':>10} {a:>9.2f} ms {b:>9.2f} ms" for rank, (a, b) in enumerate(pairs)]
        return "\n".join([*lines, f"{'makespan':>10} {self.predicted:>9.2f} ms {self.measured:>9.2f} ms"])


def compare(program: Program, costs: Costs, intervals: Intervals) -> TraceComparison:
    """The timeline that ``costs`` (milliseconds) predict for the program, beside what a step took."""
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
    """The computing instructions, from the beginning of the first micro-step of each to the end of the last.

    Where one stands for a message inside, its beginning is put off by as long.
    """
    for spans in intervals.values():
        whole: dict[int, Interval] = {}
        stood = 0
        for interval in spans:
            if program.kind[interval.row] <= InstructionKind.CELL:
                known = whole.get(interval.row, interval._replace(start=interval.start - stood))
                whole[interval.row] = known._replace(start=known.start + stood, end=interval.end, part="")
                stood = 0
            elif program.kind[interval.row] == InstructionKind.WAIT:
                stood += interval.end - interval.start
        yield from whole.items()


def _latencies(program: Program, intervals: Intervals) -> list[float]:
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


def _headers(rank: int) -> list[dict[str, Any]]:
    named: Callable[..., dict[str, Any]] = lambda what, name, **more: {  # noqa: E731
        "ph": "M", "pid": rank, "name": what, "args": {"name": name}, **more,
    }  # fmt: skip
    tracks = [named("thread_name", name, tid=track) for track, name in _TRACKS.items()]
    return [named("process_name", f"rank {rank}"), *tracks]


def _events(program: Program, rank: int, interval: Interval, begin: int) -> Iterator[dict[str, Any]]:
    """One slice per step; a batch of messages is one slice with its first message's name and all of their arguments."""
    row = interval.row
    track = _COMPUTE if program.kind[row] <= InstructionKind.CELL else _COMMUNICATION
    rows = range(row, row + interval.rows)
    start, end = (interval.start - begin) / 1000, (interval.end - begin) / 1000
    place = {"pid": rank, "tid": track}
    name = " + ".join(label(program, r) for r in rows) + (f" {interval.part}" if interval.part else "")
    yield {"ph": "X", "name": name, "ts": start, "dur": end - start, **place, "args": _arguments(program, row)}
    for r in rows:
        flow = {"name": "message", "cat": "message", "id": int(program.message[r]), **place}
        if program.kind[r] == InstructionKind.SEND:
            yield {"ph": "s", "ts": start, **flow}
        elif program.kind[r] == InstructionKind.WAIT and receives(program, r):
            yield {"ph": "f", "bp": "e", "ts": end, **flow}


def _arguments(program: Program, row: int) -> dict[str, Any]:
    x = program.instruction(row)
    span = program.spans[program.span[row]]
    values = {
        "what": sentence(program, row), "stage": x.stage, "microbatch": x.microbatch,
        "backward stage": x.stage2, "backward microbatch": x.microbatch2, "peer": x.peer, "message": x.message,
        "phase": program.phases[program.phase[row]], "source": program.where(row) if span != NOWHERE else "",
    }  # fmt: skip
    return {name: value for name, value in values.items() if value not in (-1, "")}
