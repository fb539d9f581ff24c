"""Emulated device time: every micro-step takes as long as a table says, on a clock that no busy processor disturbs.

Real ranks, real messages, real asynchronous collectives on real, tiny tensors; only their times are a model:

    compute   a segment takes its time on the device of its rank, one after the other
    exchange  takes its time in its queue, from when it was started and the queue was free; its wait returns no sooner

After its real work a micro-step sleeps until the device would be done. The device's clock runs on from the end of the
last segment, not from when the host came to the next one: as on a GPU, whose queue is filled ahead. What really
arrives late, a message or a collective, holds the device up.
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
"""Seconds after which a wait counts as one for something that had not arrived; less is the cost of asking."""


@dataclass
class Exchanged:
    """Of one instruction: seconds that its exchanges took, and that the device stood still for them."""

    carried: float = 0.0
    exposed: float = 0.0


@dataclass
class Device:
    """The emulated device of one rank and its links.

    costs: times in units of ``unit`` seconds. spent: by row of the program. busy: seconds of compute so far.
    """

    costs: CellCosts
    unit: float = 1e-3
    end: float = 0.0
    """When the last segment is done; a time of `perf_counter`."""
    held: float = 0.0
    """Before when the next one cannot begin: what was last waited for arrives then."""
    busy: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When each queue (`schedc.cell.graph.QUEUES`) has carried what was started on it."""
    due: dict[tuple[int, int, int, Half], float] = field(default_factory=dict)
    """When each exchange under way arrives: by stage, microbatch, node and half."""
    spent: dict[int, Exchanged] = field(default_factory=lambda: defaultdict(Exchanged))

    def begin(self) -> None:
        """A step begins: nothing is under way."""
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
        """Seconds of a segment or an exchange, asked for once it has really been run or started."""
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
            asked = perf_counter()
            if (late := _arrival(handler, registers, op)) is None:
                return True
            due, free = self.due.pop(key), max(self.end, self.held)
            # A host that is late itself, on a busy machine, has waited only from then on.
            self.spent[row].exposed += max(0.0, due - free, late - max(free, asked))
            self.held = max(self.held, due, late)
            _sleep_until(due)
            return None

        return wait_for

    def _received(self, handler: Handler) -> Handler:
        """A message between stages: as long as it really takes."""

        def wait_for(registers: Any, op: Any) -> bool | None:
            if (late := _arrival(handler, registers, op)) is None:
                return True
            self.held = max(self.held, late)
            return None

        return wait_for


def _arrival(handler: Handler, registers: Any, op: Any) -> float | None:
    """When what a handler waits for came, if it had to be waited for, else 0; None if it has to be asked again."""
    before = perf_counter()
    if handler(registers, op):
        return None
    after = perf_counter()
    return after if after - before > _BLOCKED else 0.0


def _sleep_until(time: float) -> None:
    if (left := time - perf_counter()) > 0:
        sleep(left)
