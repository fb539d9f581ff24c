"""Marks how far a device has come in a rank's stream: an event behind each op, and one behind the last step.

The host posts a whole step in advance. When a message never comes, the device stops in the middle of the step, and the
host stands at its end. The events tell which instruction has not ended. A device without streams needs no events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedc.ir.program import InstructionKind
from schedc_runtime.device.base import ComputeDevice, DeviceEvent
from schedc_runtime.execute.code import Code
from schedc_runtime.execute.registers import Registers

_POSTS = (InstructionKind.SEND, InstructionKind.RECV, InstructionKind.START)
"""Instructions that only post: compute does not wait for them."""


class Late(NamedTuple):
    """Where a device stands. rows: instructions, some not ended. before: whether an earlier call had them."""

    rows: tuple[int, ...]
    before: bool


class DevicePlaces:
    """The events of one rank's stream, of this call and of the one before. rows: [marks] the rows up to each mark."""

    def __init__(self, device: ComputeDevice, rows: Sequence[tuple[int, ...]]) -> None:
        self._device, self._rows = device, rows
        self._events: list[DeviceEvent] = []
        self._before: list[DeviceEvent] = []
        self._whole: list[DeviceEvent] = []
        """Events behind a graph of the whole stream, of both calls."""

    def begin(self) -> None:
        """Begin a call. The events of the last call are kept: the device may still be there."""
        self._before, self._events = self._events, []

    def passed(self) -> None:
        """The host has posted all up to the next mark. A graph that is captured keeps its events to itself."""
        if not self._device.is_captured():
            self._events.append(self._device.record())

    def passed_whole(self) -> None:
        """The host has launched the whole stream as one graph."""
        self._whole = [*self._whole[-1:], self._device.record()]
        self._events = self._whole[-1:]

    def late(self) -> Late | None:
        """The first instructions that the device has not ended; None if it has ended all that was posted."""
        for before, events in ((True, self._before), (False, self._events)):
            if (number := self._ended(events)) < len(events):
                whole = events[number] in self._whole
                return Late(tuple(row for rows in self._rows for row in rows) if whole else self._rows[number], before)
        return None

    def _ended(self, events: Sequence[DeviceEvent]) -> int:
        """How many events the device has come to. All events lie on one stream, in order."""
        low, high = 0, len(events)
        while low < high:
            middle = (low + high) // 2
            if self._device.reached(events[middle], 0.0):
                low = middle + 1
            else:
                high = middle
        return low


def with_places(code: Code, device: ComputeDevice) -> tuple[Code, DevicePlaces]:
    """The code with its marks."""
    marked, rows = _marks(code)
    places = DevicePlaces(device, rows)
    return code.woven({}, {position: [(_pass, places)] for position in marked}), places


def _marks(code: Code) -> tuple[list[int], list[tuple[int, ...]]]:
    """Positions of the steps with a mark behind them, and [marks] the rows since the mark before.

    A WAIT gets no mark of its own, unless it is the last: the mark of the next op stands behind it, too.
    """
    marked: list[int] = []
    rows: list[tuple[int, ...]] = []
    since: list[int] = []
    steps = [(position, step) for position, step in enumerate(code.steps) if step.instruction.kind not in _POSTS]
    for number, (position, step) in enumerate(steps):
        since += [row for row in range(step.row, step.row + step.width) if row not in since]
        next_row = steps[number + 1][1].row if number + 1 < len(steps) else -1
        if next_row != step.row and (step.instruction.kind is not InstructionKind.WAIT or next_row < 0):
            marked.append(position)
            rows.append(tuple(since))
            since = []
    return marked, rows


def _pass(registers: Registers, places: DevicePlaces) -> None:
    places.passed()
