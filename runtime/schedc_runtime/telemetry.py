"""Gives training steps to an OpenTelemetry tracer: a span per step of a rank, and one inside it per instruction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter_ns, time_ns
from typing import Any, NamedTuple

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor, StreamTimes
from schedc_runtime.execute.instruction_names import batch_label
from schedc_runtime.ranks.mesh import Coordinate


class _SpanTimes(NamedTuple):
    """When an instruction ran, in ns of the host's clock since the epoch."""

    name: str
    start: int
    end: int


class StepSpans:
    """Watches the steps of a pipeline, and makes spans of them behind each step.

    tracer: of OpenTelemetry. The executors note a time behind each instruction, and nothing waits for it. Times are the
    host's: on a GPU they end when an instruction is launched. A step that fails has no span.
    """

    def __init__(self, tracer: Any, places: Sequence[Coordinate], graphs: bool) -> None:
        if graphs:
            raise RuntimeFault("a step that is one graph has no spans of instructions", 'leave graphs="step" out')
        if not hasattr(tracer, "start_span"):
            raise RuntimeFault(
                f"telemetry={tracer!r} is no tracer of OpenTelemetry", 'pass opentelemetry.trace.get_tracer("trainer")'
            )
        self._tracer, self._places = tracer, places
        self._running: list[tuple[Executor, StreamTimes]] = []
        self._begin = self._epoch = 0

    def begin(self, executors: Sequence[Executor]) -> None:
        """Note times of the executors, beside what another watch wants of them."""
        self._running = []
        for executor in executors:
            count, others = len(executor.code.steps), executor.times
            if others is None or others.ended is None:
                spent = [0] * count if others is None else others.spent
                others = executor.times = StreamTimes(spent, [0] * count, [True] * count)
            self._running.append((executor, others))
        self._begin = perf_counter_ns()
        self._epoch = time_ns() - self._begin

    def end(self, step: int) -> None:
        """Make the spans of the step with a number."""
        for place, (executor, times) in zip(self._places, self._running, strict=True):
            marks = {"schedc.step": step, "schedc.schedule": executor.program.name,
                     "schedc.rank": place.pipeline, "schedc.replica": place.replica}  # fmt: skip
            self._emit(marks, self._times(executor, times))
            executor.times = None

    def _times(self, executor: Executor, times: StreamTimes) -> list[_SpanTimes]:
        """The instructions in their order. A traced step has measured itself."""
        program = executor.program
        if executor.intervals:
            return [
                _SpanTimes(batch_label(program, x.row, x.rows, x.part), x.start + self._epoch, x.end + self._epoch)
                for x in executor.intervals
            ]
        between = pairwise([self._begin, *(times.ended or ())])
        names = [batch_label(program, x.row, x.width, x.label) for x in executor.code.steps]
        return [
            _SpanTimes(name, start + self._epoch, end + self._epoch)
            for name, (start, end) in zip(names, between, strict=True)
        ]

    def _emit(self, marks: dict[str, Any], instructions: Sequence[_SpanTimes]) -> None:
        """A span of a step, and those of its instructions inside."""
        from opentelemetry.trace import set_span_in_context

        begin = min([self._begin + self._epoch, *(x.start for x in instructions[:1])])
        end = instructions[-1].end if instructions else perf_counter_ns() + self._epoch
        span = self._tracer.start_span("step", start_time=begin, attributes=marks)
        inside = set_span_in_context(span)
        for x in instructions:
            self._tracer.start_span(x.name, context=inside, start_time=x.start).end(end_time=x.end)
        span.end(end_time=end)
