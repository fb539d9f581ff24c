"""Watches the ranks of a pipeline for such as become slower, while it trains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.execute.instruction_names import batch_label
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.speed.between import PauseClock
from schedc_runtime.speed.clock import StreamClock
from schedc_runtime.speed.details import StepDetails
from schedc_runtime.speed.links import WINDOW as LINK_WINDOW
from schedc_runtime.speed.links import LinkClock, LinkRule, SlowLink, latencies
from schedc_runtime.speed.ring import RunStream, StepRing
from schedc_runtime.speed.rule import BASELINE, WARMING, WINDOW, Alarm, SpeedRule, moved

_STREAMS = 64
"""Streams of which a baseline is kept."""
_ROUNDS = 10
"""How often a baseline that is not settled goes on."""


class _Stream:
    """The clocks and the rule of the executors that run one program on one signature of batches.

    rule: None before there is a baseline. rounds: how often one was tried.
    """

    def __init__(self, executors: Sequence[Executor], place: Coordinate | None) -> None:
        self.clocks = [StreamClock(executor) for executor in executors]
        self.rule: SpeedRule | None = None
        self.rounds = 0
        self.steps: list[int] = []
        first = executors[0]
        self.links = None if place is None else LinkClock(first, place.pipeline, place.replica)
        self.link_rule, self.link_steps = LinkRule(), list[int]()
        self.run = RunStream(
            first.program.name,
            [batch_label(first.program, step.row, step.width, step.label) for step in first.code.steps],
            [step.instruction.computes for step in first.code.steps],
        )


class SpeedWatch:
    """Measures all training steps of a pipeline, and tells alarms behind every tenth.

    alarms: all so far, the same on every rank. names: of all ranks. tell: called on the first process, with a line for
    each alarm. Batches of another shape have a baseline of their own. ring: where the last steps are kept. step: number
    of training steps so far. place: of this process, where links are watched, too. details: what else is kept there.
    """

    def __init__(
        self,
        control: ControlPlane,
        names: Sequence[str],
        tell: Callable[[str], Any],
        step: int = 0,
        ring: StepRing | None = None,
        place: Coordinate | None = None,
        details: StepDetails | None = None,
    ) -> None:
        self._control, self._names, self._tell = control, names, tell
        self._step, self.ring = step, ring
        self._place, self._details = place, details
        self._pauses = PauseClock(control)
        self.slow_links: list[SlowLink] = []
        """All slow links so far, the same on every rank."""
        self._streams: dict[Hashable, _Stream] = {}
        self._current: _Stream | None = None
        self.alarms: list[Alarm] = []

    def begin(self, executors: Sequence[Executor]) -> None:
        """A step begins, which ``executors`` run."""
        key = tuple(map(id, executors)), executors[0].registers.forms
        if key not in self._streams:
            if len(self._streams) == _STREAMS:
                self._streams.clear()
            self._streams[key] = _Stream(executors, self._place)
        self._current = self._streams[key]
        if self._details is not None:
            self._details.forget()
        for clock in self._current.clocks:
            clock.begin(None if self.ring is None else self.ring.begin(self._step + 1, self._current.run))
        self._pauses.begin()

    def end(self, step: int) -> None:
        """The training step with a number has succeeded. A collective in every tenth step behind a baseline."""
        self._take_in(step)
        self._pauses.end()

    def _take_in(self, step: int) -> None:
        stream, pause = self._current, self._pauses.last()
        assert stream is not None
        self._step = step
        taken = [clock for clock in stream.clocks if clock.end(pause)]
        if self.ring is not None:
            self.ring.end(None if self._details is None else self._details.told())
            if stream.links is not None and stream.clocks[0].measured:
                self._watch_links(stream, stream.links)
        if any(clock.full for clock in stream.clocks):
            self._settle(stream)
        if len(taken) < len(stream.clocks):
            for clock in taken:
                clock.forget_last()
            return
        stream.steps.append(step)
        if stream.rule is not None and len(stream.steps) == WINDOW:
            self._judge(stream, stream.rule)

    def close(self) -> None:
        """Keep no further steps."""
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        if self._details is not None:
            self._details.close()
            self._details = None

    def _watch_links(self, stream: _Stream, links: LinkClock) -> None:
        """Take in the messages of a step, and compare links behind every fifth. A collective then."""
        stream.link_steps.append(self._step)
        if links.end(stream.clocks[0].times) < LINK_WINDOW:
            return
        steps, stream.link_steps = stream.link_steps, []
        found = self._control.fold("the latencies of messages", links.take(), latencies)
        if steps[0] <= WARMING:
            return
        for link in stream.link_rule.window(steps[0], {(sender, to): value for sender, to, value in found}):
            self.slow_links.append(link)
            if self._control.process == 0:
                self._tell(link.told())

    def _settle(self, stream: _Stream) -> None:
        """End a baseline whose halves are alike, and let another one go on. A collective."""
        mine = {clock.executor.name: clock.quiet() for clock in stream.clocks}
        quiet = self._by_kind(self._control.gather("the usual times of ranks", mine))
        stream.rounds += 1
        change = moved(quiet)
        if change is not None and self._control.process == 0:
            then = (
                f"{BASELINE // 2} steps more are waited for" if stream.rounds < _ROUNDS else "they are the baseline now"
            )
            self._tell(
                f"the usual times of ranks are not settled: {self._names[change.rank]} takes {change.factor:.2f} times"
                f" what it took {BASELINE // 2} steps before for {change.kind}; {then}"
            )
        if change is None or stream.rounds == _ROUNDS:
            stream.rule = SpeedRule(quiet)
        for clock in stream.clocks:
            if stream.rule is not None:
                clock.settle()
            else:
                clock.forget_half()

    def _judge(self, stream: _Stream, rule: SpeedRule) -> None:
        mine = {clock.executor.name: clock.take() for clock in stream.clocks}
        steps, stream.steps = stream.steps, []
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


def check_watchable(device: str, graphs: bool, level: int = 0, folder: object = None, in_process: bool = False) -> None:
    """Raise `RuntimeFault` for a level that there is not, and where the processor's time says nothing of a rank."""
    if level not in (0, 1, 2):
        raise RuntimeFault(f"a watch of speed has no level {level}", "pass level=0, level=1 or level=2")
    if level and folder is None:
        help = "watch_speed(pipe, level=..., folder=saved.places.folder), beside the images, or a folder of your own"
        raise RuntimeFault(f"at level {level} a watch of speed keeps the last steps in a file, and has no folder", help)
    if level and in_process:
        raise RuntimeFault("ranks of one process have no times of their own for the last steps", "watch at level 0")
    if device != "cpu":
        raise RuntimeFault(
            f"a watch of speed reads the processor time of a CPU, and the pipeline computes on {device}",
            "trace steps there: pipe.step(..., trace=True)",
        )
    if graphs:
        raise RuntimeFault("a watch of speed cannot look into steps that are graphs", 'leave graphs="step" out')
