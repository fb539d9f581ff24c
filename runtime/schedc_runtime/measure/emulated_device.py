"""Emulated device time: every micro-step takes as long as a table says, whatever else the processor does.

Ranks, messages and asynchronous collectives are real, on tiny tensors. Only their times are a model:

    compute   a segment takes its time on the device of its rank, one after the other
    exchange  takes its time in its queue, once it is started and the queue is free; its wait returns no sooner.
              With `SharedStarts` it begins with the last of its ranks, and takes as long as on the slowest

After its real work a micro-step sleeps until the device would be done. The device's clock runs on from the end of the
last segment, as on a GPU whose queue is filled ahead. When the host reaches the next segment does not matter. A message
or a collective that really arrives late holds the device up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep
from typing import Any, NamedTuple

from schedc.cell.costs import CellCosts
from schedc.cell.program import Action, Half
from schedc_runtime.execute.code import BoundStep, Code, Handler
from schedc_runtime.execute.handlers import wait
from schedc_runtime.execute.micro_steps import MICRO, MicroStep
from schedc_runtime.measure.shared_starts import SharedStarts, Ticket

ExchangeKey = tuple[int, int, int, Half]
"""Stage, microbatch, node and half of an exchange."""

_BLOCKED = 2e-4
"""Seconds. A wait that takes longer had to wait; a shorter one found what it waited for."""


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


class Carried(NamedTuple):
    """When an exchange could begin for its own rank, when it began and when it ends, in seconds of `perf_counter`."""

    own: float
    begin: float
    end: float


@dataclass
class Device:
    """The emulated device of one rank and its links.

    costs: times in units of ``unit`` seconds. starts: those of the other ranks; None: an exchange waits for no one.
    """

    costs: CellCosts
    unit: float = 1e-3
    starts: SharedStarts | None = None
    end: float = 0.0
    """Seconds of `perf_counter`: when the last segment is done."""
    held: float = 0.0
    """Seconds of `perf_counter`: the next segment begins no sooner, since what it waited for arrives then."""
    busy: float = 0.0
    """Seconds of compute so far."""
    messages: float = 0.0
    """Seconds for which the device was idle for messages between stages so far."""
    host: float = 0.0
    """Seconds for which the device was idle since its host reached a wait late, on a busy machine, so far."""
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of `perf_counter`, by queue (`schedc.cell.graph.QUEUES`): when it has carried what was started on it."""
    queued: dict[str, dict[ExchangeKey, Started]] = field(default_factory=lambda: defaultdict(dict))
    """By queue, in the order of their starts: exchanges whose beginning is not known yet."""
    due: dict[ExchangeKey, Carried] = field(default_factory=dict)
    """Exchanges whose end is known."""
    spent: dict[int, Exchanged] = field(default_factory=lambda: defaultdict(Exchanged))
    """By row of the program."""

    def begin(self) -> None:
        """Begin a step."""
        self.end = self.held = perf_counter()
        self.busy = self.messages = self.host = 0.0
        for table in (self.free, self.queued, self.due, self.spent):
            table.clear()

    def code(self, code: Code) -> Code:
        """The same steps in emulated time."""
        return replace(code, steps=[step._replace(handler=self._emulated(step)) for step in code.steps])

    def _emulated(self, step: BoundStep) -> Handler:
        handler, op, row = step.handler, step.operands, step.row
        if not isinstance(op, MicroStep):
            return self._received(handler) if handler is wait else handler
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
            self.end = max(self.end, self.held) + time
            self.busy += time
            _sleep_until(self.end)

        return run

    def _started(self, handler: Handler, queue: str, key: ExchangeKey) -> Handler:
        def start(registers: Any, op: Any) -> None:
            handler(registers, op)
            begin, time = max(self.end, self.held), self.time(op, key[-1])
            ticket = None if self.starts is None else self.starts.post(op.stage.shape, op.node, begin, time)
            self.queued[queue][key] = Started(begin, time, ticket)

        return start

    def _carried(self, queue: str, key: ExchangeKey) -> Carried:
        """When an exchange that has really completed is carried. Those before it in its queue have completed, too."""
        queued = self.queued[queue]
        while key not in self.due:
            first = next(iter(queued))
            start, time, ticket = queued.pop(first)
            own = max(start, self.free[queue])
            last, longest = (own, time) if self.starts is None or ticket is None else self.starts.last(ticket)
            begin = max(own, last)
            self.free[queue] = begin + longest
            self.due[first] = Carried(own, begin, self.free[queue])
        return self.due.pop(key)

    def _waited(self, handler: Handler, queue: str, key: ExchangeKey, row: int) -> Handler:
        def wait_for(registers: Any, op: Any) -> bool | None:
            reached = perf_counter()
            if (late := _arrival(handler, registers, op)) is None:
                return True
            (own, begin, due), free = self._carried(queue, key), max(self.end, self.held)
            # A host that is late itself, on a busy machine, waits only from then on.
            blocked = max(0.0, due - free, late - max(free, reached))
            waiting = min(max(0.0, begin - max(free, own)), blocked)
            spent = self.spent[row]
            spent.carried += due - begin
            spent.waiting += waiting
            spent.exposed += blocked - waiting
            self.host += max(0.0, max(due, late) - free - blocked)
            self.held = max(self.held, due, late)
            _sleep_until(due)
            return None

        return wait_for

    def _received(self, handler: Handler) -> Handler:
        """A message between stages takes as long as it really does."""

        def wait_for(registers: Any, op: Any) -> bool | None:
            if (late := _arrival(handler, registers, op)) is None:
                return True
            self.messages += max(0.0, late - max(self.end, self.held))
            self.held = max(self.held, late)
            return None

        return wait_for


def _arrival(handler: Handler, registers: Any, op: Any) -> float | None:
    """Seconds of `perf_counter`: when what a handler waits for came; 0 if it was there, None if it must be called
    again."""
    before = perf_counter()
    if handler(registers, op):
        return None
    after = perf_counter()
    return after if after - before > _BLOCKED else 0.0


def _sleep_until(time: float) -> None:
    if (left := time - perf_counter()) > 0:
        sleep(left)
