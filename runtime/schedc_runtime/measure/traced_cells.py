"""Times of segments and exchanges, read from the traced steps of a pipeline that runs in serial order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.program import Action, Half
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Interval
from schedc_runtime.measure.stage_times import HALVES
from schedc_runtime.measure.step_trace import Intervals


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

    The attention behind another MoE layer also ends that layer: only one that begins a stage is counted.
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
    return CellCosts.of(_medians(segments), _medians(exchanges))


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


def _medians(times: Mapping[tuple[str, Half], list[float]]) -> dict[str, SegmentTimes]:
    """The median of each role and half; a half that never ran takes no time."""
    roles = dict.fromkeys(role for role, _ in times)
    return {role: SegmentTimes(*(median(times.get((role, half), [0.0])) for half in HALVES)) for role in roles}
