"""Emulated device time: every micro-step takes as long as a table says, whatever else the processor does.

Ranks, messages and asynchronous collectives are real, on tiny tensors. Only their times are a model:

    compute   a segment takes its time on the device of its rank, one after the other
    exchange  takes its time in its queue, once it is started and the queue is free; its wait returns no sooner

After its real work a micro-step sleeps until the device would be done. The device's clock runs on from the end of the
last segment, as on a GPU whose queue is filled ahead. When the host reaches the next segment does not matter. A message
or a collective that really arrives late holds the device up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep
from typing import Any

from schedc.cell.costs import CellCosts
from schedc.cell.program import Action, Half
from schedc_runtime.execute.code import BoundStep, Code, Handler
from schedc_runtime.execute.handlers import wait
from schedc_runtime.execute.micro_steps import MICRO, MicroStep

_BLOCKED = 2e-4
"""Seconds. A wait that takes longer had to wait; a shorter one found what it waited for."""


@dataclass
class Exchanged:
    """Times of one instruction, in seconds.

    carried: what its exchanges took. exposed: how long the device was idle for them.
    """

    carried: float = 0.0
    exposed: float = 0.0


@dataclass
class Device:
    """The emulated device of one rank and its links.

    costs: times in units of ``unit`` seconds.
    """

    costs: CellCosts
    unit: float = 1e-3
    end: float = 0.0
    """Seconds of `perf_counter`: when the last segment is done."""
    held: float = 0.0
    """Seconds of `perf_counter`: the next segment begins no sooner, since what it waited for arrives then."""
    busy: float = 0.0
    """Seconds of compute so far."""
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of `perf_counter`, by queue (`schedc.cell.graph.QUEUES`): when it has carried what was started on it."""
    due: dict[tuple[int, int, int, Half], float] = field(default_factory=dict)
    """Seconds of `perf_counter`, by stage, microbatch, node and half: when each started exchange arrives."""
    spent: dict[int, Exchanged] = field(default_factory=lambda: defaultdict(Exchanged))
    """By row of the program."""

    def begin(self) -> None:
        """Begin a step."""
        self.end = self.held = perf_counter()
        self.busy = 0.0
        for table in (self.free, self.due, self.spent):
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
        if action is Action.START:
            return self._started(handler, op.stage.shape.queues[op.node], key, row)
        return self._waited(handler, key, row)

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

    def _started(self, handler: Handler, queue: str, key: tuple[int, int, int, Half], row: int) -> Handler:
        def start(registers: Any, op: Any) -> None:
            handler(registers, op)
            time = self.time(op, key[-1])
            self.free[queue] = self.due[key] = max(self.free[queue], self.end, self.held) + time
            self.spent[row].carried += time

        return start

    def _waited(self, handler: Handler, key: tuple[int, int, int, Half], row: int) -> Handler:
        def wait_for(registers: Any, op: Any) -> bool | None:
            reached = perf_counter()
            if (late := _arrival(handler, registers, op)) is None:
                return True
            due, free = self.due.pop(key), max(self.end, self.held)
            # A host that is late itself, on a busy machine, waits only from then on.
            self.spent[row].exposed += max(0.0, due - free, late - max(free, reached))
            self.held = max(self.held, due, late)
            _sleep_until(due)
            return None

        return wait_for

    def _received(self, handler: Handler) -> Handler:
        """A message between stages takes as long as it really does."""

        def wait_for(registers: Any, op: Any) -> bool | None:
            if (late := _arrival(handler, registers, op)) is None:
                return True
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
