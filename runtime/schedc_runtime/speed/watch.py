"""Watches the ranks of a pipeline for such as become slower, while it trains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.speed.clock import StreamClock
from schedc_runtime.speed.rule import WINDOW, Alarm, SpeedRule

_STREAMS = 64
"""Streams of which a baseline is kept."""


class _Stream:
    """The clocks and the rule of the executors that run one program on one signature of batches.

    rule: None before there is a baseline.
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        self.clocks = [StreamClock(executor) for executor in executors]
        self.rule: SpeedRule | None = None
        self.steps: list[int] = []
        self.ratios: list[dict[str, dict[str, float]]] = []


class SpeedWatch:
    """Measures all training steps of a pipeline, and tells alarms behind every tenth.

    alarms: all so far, the same on every rank. names: of all ranks. tell: called on the first process, with a line for
    each alarm. Batches of another shape have a baseline of their own.
    """

    def __init__(self, control: ControlPlane, names: Sequence[str], tell: Callable[[str], Any]) -> None:
        self._control, self._names, self._tell = control, names, tell
        self._streams: dict[Hashable, _Stream] = {}
        self._current: _Stream | None = None
        self.alarms: list[Alarm] = []

    def begin(self, executors: Sequence[Executor]) -> None:
        """A step begins, which ``executors`` run."""
        key = tuple(map(id, executors)), executors[0].registers.forms
        if key not in self._streams:
            if len(self._streams) == _STREAMS:
                self._streams.clear()
            self._streams[key] = _Stream(executors)
        self._current = self._streams[key]
        for clock in self._current.clocks:
            clock.begin()

    def end(self, step: int) -> None:
        """The training step with a number has succeeded. A collective in every tenth step behind a baseline."""
        stream = self._current
        assert stream is not None
        ratios = {clock.executor.name: clock.end() for clock in stream.clocks}
        if not all(ratios.values()):
            return
        if stream.rule is None:
            mine = {clock.executor.name: clock.quiet() for clock in stream.clocks}
            stream.rule = SpeedRule(self._by_kind(self._control.gather("the usual times of ranks", mine)))
        stream.steps.append(step)
        stream.ratios.append(ratios)
        if len(stream.steps) == WINDOW:
            self._judge(stream, stream.rule)

    def _judge(self, stream: _Stream, rule: SpeedRule) -> None:
        mine = {name: [ratios[name] for ratios in stream.ratios] for name in stream.ratios[0]}
        steps, stream.steps, stream.ratios = stream.steps, [], []
        everyone = self._by_kind(self._control.gather("the times of ranks", mine))
        for step, ratios in zip(steps, everyone, strict=True):
            for alarm in rule.step(step, ratios):
                self.alarms.append(alarm)
                if self._control.process == 0:
                    self._tell(alarm.told(self._names[alarm.rank]))

    def _by_kind(self, everyone: Sequence[dict[str, list[dict[str, float]]]]) -> list[dict[str, list[float | None]]]:
        """[steps] by kind: [ranks] ratios. everyone: [processes] by name of a rank: [steps] ratios by kind."""
        told = {name: steps for process in everyone for name, steps in process.items()}
        return [
            {kind: [rank.get(kind) for rank in step] for kind in sorted({kind for rank in step for kind in rank})}
            for step in zip(*(told[name] for name in self._names), strict=True)
        ]


def check_watchable(device: str, graphs: bool) -> None:
    """Raise `RuntimeFault` where the processor time of the host does not tell how fast a rank is."""
    if device != "cpu":
        raise RuntimeFault(
            f"a watch of speed reads the processor time of a CPU, and the pipeline computes on {device}",
            "trace steps there: pipe.step(..., trace=True)",
        )
    if graphs:
        raise RuntimeFault("a watch of speed cannot look into steps that are graphs", 'leave graphs="step" out')
