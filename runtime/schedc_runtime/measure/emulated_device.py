"""Emulated device time: every micro-step takes as long as a table says, whatever the processor does.

Ranks, messages and asynchronous collectives are real, on tiny tensors. The executor runs its bound code, in its order
and with its waits. Only their times are a model, on a clock that each rank keeps for its device:

    compute   a segment takes its time on the device of its rank, one after the other
    exchange  begins in its queue when the last of its ranks has started it and the queue is free. It takes as long as
              on the slowest of them. Its wait ends no sooner
    message   leaves when its sender's clock reaches the post. Its wait ends no sooner than ``latency`` later
    work      begins on its lane when the device's clock reaches its START and the lane is free. It takes its bytes over
              the lane's speed. Its JOIN ends no sooner

Ranks tell each other of their starts by `SharedStarts`. Nothing sleeps, and a busy machine changes no figure. Whatever
is no micro-step takes no time: launches by the host, sums of gradients over copies or replicas, the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from schedc.cell.costs import CellCosts
from schedc.cell.program import Action, Half
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.code import BoundStep, Code, Handler
from schedc_runtime.execute.handlers import backward, cell, forward, post, recompute, wait, weight
from schedc_runtime.execute.micro_steps import MICRO, MicroStep
from schedc_runtime.execute.operands import WorkOperands
from schedc_runtime.execute.registers import Registers
from schedc_runtime.execute.works import join_work, start_work
from schedc_runtime.measure.shared_starts import AwaitedMessage, SharedStarts, Ticket

ExchangeKey = tuple[int, int, int, Half]
"""Stage, microbatch, node and half of an exchange."""

_WHOLE = (forward, backward, weight, recompute, cell)


@dataclass
class Exchanged:
    """Times of one instruction, in seconds.

    carried: what its exchanges took. exposed: how long the device was idle for them while they were carried.
    waiting: how long it was idle before another rank started them.
    """

    carried: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0


class Started(NamedTuple):
    """An exchange in a queue: start and time in seconds, and its ticket where the starts of other ranks count."""

    start: float
    time: float
    ticket: Ticket | None


@dataclass
class LaneTime:
    """Times of one lane beside compute, in seconds. busy: what its works took. exposed: how long JOINs waited."""

    busy: float = 0.0
    exposed: float = 0.0


class Carried(NamedTuple):
    """When an exchange could begin for its own rank, when it began and when it ends, in seconds of the clock."""

    own: float
    begin: float
    end: float


@dataclass
class Device:
    """The emulated device of one rank and its links.

    costs: times in units of ``unit`` seconds. starts: those of all ranks; None where this rank is alone.
    latency: seconds of a message. speeds: bytes per second of the lanes of works.
    """

    costs: CellCosts
    unit: float = 1e-3
    starts: SharedStarts | None = None
    latency: float = 0.0
    speeds: Mapping[str, float] = field(default_factory=dict)
    clock: float = 0.0
    """Seconds of the step so far: when the device can begin the next segment."""
    busy: float = 0.0
    """Seconds of compute so far."""
    messages: float = 0.0
    """Seconds for which the device was idle for messages between stages so far."""
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the clock, by queue (`schedc.cell.graph.QUEUES`): when it has carried what was started on it."""
    queued: dict[str, dict[ExchangeKey, Started]] = field(default_factory=lambda: defaultdict(dict))
    """By queue, in the order of their starts: exchanges whose beginning is not known yet."""
    due: dict[ExchangeKey, Carried] = field(default_factory=dict)
    """Exchanges whose end is known."""
    expected: dict[int, AwaitedMessage] = field(default_factory=dict)
    """Messages to this rank, by the handle that their wait has."""
    ends: dict[int, float] = field(default_factory=dict)
    """Seconds of the clock at which each work ends that is not joined, by its number."""
    lanes: dict[str, LaneTime] = field(default_factory=lambda: defaultdict(LaneTime))
    """Times of the lanes of works so far."""
    spent: dict[int, Exchanged] = field(default_factory=lambda: defaultdict(Exchanged))
    """By row of the program."""

    def begin(self) -> None:
        """Begin a step, on all ranks."""
        self.clock = self.busy = self.messages = 0.0
        for table in (self.free, self.queued, self.due, self.expected, self.ends, self.lanes, self.spent):
            table.clear()

    def code(self, code: Code) -> Code:
        """The same steps in emulated time. Raises `RuntimeFault` for a step whose time is not known."""
        return replace(code, steps=[step._replace(handler=self._emulated(step)) for step in code.steps])

    def _emulated(self, step: BoundStep) -> Handler:
        handler, op, row = step.handler, step.operands, step.row
        if handler in _WHOLE:
            raise RuntimeFault("emulated time has no times of whole stages", "use Cut(segmented=True) for all stages")
        if handler in (post, wait):
            return self._posted(handler) if handler is post else self._received(handler)
        if handler in (start_work, join_work):
            return self._work_started if handler is start_work else self._work_joined
        if not isinstance(op, MicroStep):
            return handler
        half, action = next(key for key, value in MICRO.items() if value is handler)
        key = (op.stage.index, op.microbatch, op.node, half)
        if action is Action.RUN:
            return self._computed(handler, half)
        queue = op.stage.shape.queues[op.node]
        if action is Action.START:
            return self._started(handler, queue, key)
        return self._waited(handler, queue, key, row)

    def time(self, op: MicroStep, half: Half) -> float:
        """Seconds of a segment or an exchange. Called once it has really been run or started."""
        return self.costs.duration(op.stage.shape, half, op.node) * self.unit

    def _computed(self, handler: Handler, half: Half) -> Handler:
        def run(registers: Any, op: Any) -> None:
            handler(registers, op)
            time = self.time(op, half)
            self.clock += time
            self.busy += time

        return run

    def _started(self, handler: Handler, queue: str, key: ExchangeKey) -> Handler:
        def start(registers: Any, op: Any) -> None:
            handler(registers, op)
            shape, time = op.stage.shape, self.time(op, key[-1])
            ticket = None if self.starts is None else self.starts.post(shape, op.node, self.clock, time)
            self.queued[queue][key] = Started(self.clock, time, ticket)

        return start

    def carried(self, queue: str, key: ExchangeKey) -> Carried:
        """When an exchange that has really completed is carried. Those before it in its queue are carried first."""
        queued = self.queued[queue]
        while key not in self.due:
            first = next(iter(queued))
            start, time, ticket = queued.pop(first)
            own = max(start, self.free[queue])
            # The queues of its other ranks carry the same exchanges in the same order: they are free by then, too.
            last, longest = (own, time) if self.starts is None or ticket is None else self.starts.last(ticket)
            begin = max(own, last)
            self.free[queue] = begin + longest
            self.due[first] = Carried(own, begin, self.free[queue])
        return self.due.pop(key)

    def _waited(self, handler: Handler, queue: str, key: ExchangeKey, row: int) -> Handler:
        def wait_for(registers: Any, op: Any) -> bool | None:
            if handler(registers, op):
                return True
            own, begin, end = self.carried(queue, key)
            blocked = max(0.0, end - self.clock)
            waiting = min(max(0.0, begin - max(self.clock, own)), blocked)
            spent = self.spent[row]
            spent.carried += end - begin
            spent.waiting += waiting
            spent.exposed += blocked - waiting
            self.clock += blocked
            return None

        return wait_for

    def _work_started(self, registers: Registers, op: WorkOperands) -> None:
        if op.lane not in self.speeds:
            raise RuntimeFault(f"the emulated device has no lane {op.lane}", "give its speed: Device(speeds={...})")
        start_work(registers, op)
        size = registers.works[op.work] if op.bytes < 0 else op.bytes
        time = size / self.speeds[op.lane]
        self.free[op.lane] = self.ends[op.work] = max(self.clock, self.free[op.lane]) + time
        self.lanes[op.lane].busy += time

    def _work_joined(self, registers: Registers, op: WorkOperands) -> None:
        join_work(registers, op)
        idle = max(0.0, self.ends.pop(op.work) - self.clock)
        self.lanes[op.lane].exposed += idle
        self.clock += idle

    def _posted(self, handler: Handler) -> Handler:
        if self.starts is None:
            raise RuntimeFault("emulated ranks send messages to each other", "give every device its SharedStarts")
        starts = self.starts

        def start(registers: Any, batch: Any) -> None:
            for message in batch:
                if message.receive:
                    self.expected[message.handle] = starts.expect(message.peer)
                else:
                    starts.send(message.peer, self.clock)
            handler(registers, batch)

        return start

    def _received(self, handler: Handler) -> Handler:
        """A wait for a message. A sender waits for nothing: the link takes what it sends."""

        def wait_for(registers: Any, op: Any) -> bool | None:
            if handler(registers, op):
                return True
            if self.starts is not None and (message := self.expected.pop(op.handle, None)) is not None:
                idle = max(0.0, self.starts.sent(message) + self.latency - self.clock)
                self.messages += idle
                self.clock += idle
            return None

        return wait_for
