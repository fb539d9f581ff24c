"""Emulated device time: every micro-step takes as long as a table says, whatever the processor does.

Ranks, messages and asynchronous collectives are real, on tiny tensors. The executor runs its bound code, in its order
and with its waits. Only their times are a model, on a clock that each rank keeps for its device:

    compute   a segment takes its time on the device of its rank, one after the other
    exchange  begins in its queue when the last of its ranks has started it and the queue is free. It takes as long as
              on the slowest of them. Its wait ends no sooner
    message   leaves when its sender's clock reaches the post. Its wait ends no sooner than ``latency`` later
    work      begins on its lane when the device's clock reaches its START and the lane is free; among replicas when
              the last of them has started it. It takes its bytes over the lane's speed. Its JOIN ends no sooner

Ranks tell each other of their starts by `SharedStarts`. Nothing sleeps, and a busy machine changes no figure. Whatever
else takes no time: launches by the host, sums of gradients over copies, the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from schedc.cell.costs import CellCosts
from schedc.cell.program import Action, Half
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.code import BoundStep, Code, Handler
from schedc_runtime.execute.handlers import backward, cell, forward, post, recompute, wait, weight
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.execute.operands import ReplicatedStage, WorkOperands
from schedc_runtime.execute.registers import Registers
from schedc_runtime.execute.works import join_work, start_work
from schedc_runtime.measure.shared_starts import REPLICA_CHANNELS, AwaitedMessage, SharedStarts, Ticket

ExchangeKey = tuple[int, int, int, Half]
"""Stage, microbatch, node and half of an exchange."""
QueueKey = ExchangeKey | int
"""An exchange, or the number of a work."""

BEHIND_MESSAGES = ("gather", "fetch")
"""The kinds of works whose JOINs stand behind the messages of a cell. Segmented stages wait inside the cell."""

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


class Stood(NamedTuple):
    """A JOIN at which a device stood from ``begin`` to ``end``, in seconds of the clock. times: those of its work."""

    begin: float
    end: float
    times: tuple[LaneTime, ...]


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
    """Seconds of the clock, by queue (`schedc.cell.graph.QUEUES`): the end of the last exchange so far."""
    queued: dict[str, dict[QueueKey, Started]] = field(default_factory=lambda: defaultdict(dict))
    """By queue or lane, in the order of their starts: exchanges and works whose beginning is not known yet."""
    due: dict[QueueKey, Carried] = field(default_factory=dict)
    """Exchanges whose end is known."""
    expected: dict[int, AwaitedMessage] = field(default_factory=dict)
    """Messages to this rank, by the handle of the wait."""
    lanes: dict[str, LaneTime] = field(default_factory=lambda: defaultdict(LaneTime))
    """Times of the lanes of works so far."""
    kinds: dict[str, LaneTime] = field(default_factory=lambda: defaultdict(LaneTime))
    """The same by kind of work."""
    stood: list[Stood] = field(default_factory=list)
    """JOINs of `BEHIND_MESSAGES` since the last segment."""
    spent: dict[int, Exchanged] = field(default_factory=lambda: defaultdict(Exchanged))
    """By row of the program."""

    def begin(self) -> None:
        """Begin a step, on all ranks."""
        self.clock = self.busy = self.messages = 0.0
        for table in (self.free, self.queued, self.due, self.expected, self.lanes, self.kinds, self.stood, self.spent):
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
        half, action = op.half, op.action
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
            self.stood.clear()
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

    def carried(self, queue: str, key: QueueKey) -> Carried:
        """When an exchange that has really completed is carried. Earlier exchanges of the queue are carried first."""
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

    def _work_started(self, registers: Registers, op: WorkOperands) -> bool | None:
        if op.lane not in self.speeds:
            raise RuntimeFault(f"the emulated device has no lane {op.lane}", "give its speed: Device(speeds={...})")
        if start_work(registers, op):
            return True
        if op.microbatch < 0:
            time, ticket = self._among_replicas(registers.works[op.work], op)
        else:
            size = registers.works[op.work] if op.bytes < 0 else op.bytes
            time, ticket = size / self.speeds[op.lane], None
        if time:  # a DROP waits for nothing
            self.queued[op.lane][op.work] = Started(self.clock, time, ticket)
        return None

    def _among_replicas(self, size: int, op: WorkOperands) -> tuple[float, Ticket | None]:
        """Seconds of a work among replicas, and its ticket. size: bytes of the whole tensors."""
        members = cast(ReplicatedStage, op.stage).members
        time = size * (members - 1) / members / self.speeds[op.lane]
        if self.starts is None or not time:
            return time, None
        mesh, channel = self.starts.mesh, REPLICA_CHANNELS[op.group]
        apart = mesh.holding_the_same if mesh.experts > 1 else mesh.splitting_the_same
        among = (mesh.replicas_of if channel == "replicas" else apart)(mesh.coordinate(self.starts.process))
        return time, self.starts.post_among(tuple(among), channel, self.clock, time)

    def _work_joined(self, registers: Registers, op: WorkOperands) -> bool | None:
        if join_work(registers, op):
            return True
        if op.work not in self.due and op.work not in self.queued[op.lane]:
            return None
        _, begin, end = self.carried(op.lane, op.work)
        idle = max(0.0, end - self.clock)
        times = self.lanes[op.lane], self.kinds[op.kind]
        for each in times:
            each.busy += end - begin
            each.exposed += idle
        if op.kind in BEHIND_MESSAGES:
            self.stood.append(Stood(self.clock, self.clock + idle, times))
        self.clock += idle
        return None

    def _for_message_too(self, arrival: float) -> float:
        """Seconds in which the device stood at JOINs and would have waited for a message anyway: the message's."""
        shared = 0.0
        for stood in self.stood:
            both = max(0.0, min(arrival, stood.end) - stood.begin)
            shared += both
            for each in stood.times:
                each.exposed -= both
        self.stood = [stood._replace(begin=max(stood.begin, arrival)) for stood in self.stood if stood.end > arrival]
        return shared

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
        """A wait for a message. A sender waits for nothing: the link takes the message."""

        def wait_for(registers: Any, op: Any) -> bool | None:
            if handler(registers, op):
                return True
            if self.starts is not None and (message := self.expected.pop(op.handle, None)) is not None:
                arrival = self.starts.sent(message) + self.latency
                idle = max(0.0, arrival - self.clock)
                self.messages += idle + self._for_message_too(arrival)
                self.clock += idle
            return None

        return wait_for
