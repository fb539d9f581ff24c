"""16 faults in the order of streams, each planted in the runtime, and whether a watched step finds it.

A fault changes what one function asks of the device, or one method: a wait that is missing, an event on the wrong
stream, memory that nobody holds. Two do no harm on any device today, and are found under ``strict`` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from schedc_runtime.device import choice
from schedc_runtime.device.choice import HostCopy, device_for
from schedc_runtime.device.simulated import SimulatedDevice, SimulatedEvent
from schedc_runtime.errors import NonFiniteLoss
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.offload.boxes import PlaceOfBox
from schedc_runtime.offload.lanes import FROM_HOST, StreamLanes
from schedc_runtime.offload.microbatch import MicrobatchOffload, _copy
from schedc_runtime.offload.snapshot import StageSnapshot
from schedc_runtime.transport.collectives_in_process import SideStream, joined
from support.simulated_cases import Watched, expert_steps, late, snapshot_steps, watched

Plant = Callable[[], Any]


def left_out(owner: type, method: str, caller: Any) -> Plant:
    """A call of a method of the device does nothing where the function ``caller`` makes it."""
    original = getattr(owner, method)

    def call(self: Any, *args: Any) -> Any:
        return None if sys._getframe(1).f_code is caller.__code__ else original(self, *args)

    return partial(patch.object, owner, method, call)


def wrong_stream(caller: Any) -> Plant:
    """The event that ``caller`` records behind a work is recorded on compute."""
    original = SimulatedDevice.record

    def record(self: SimulatedDevice, stream: Any = None) -> SimulatedEvent:
        return original(self, None if sys._getframe(1).f_code is caller.__code__ else stream)

    return partial(patch.object, SimulatedDevice, "record", record)


@contextmanager
def freed_at_the_start() -> Iterator[None]:
    start = MicrobatchOffload.start_offload

    def starts(self: MicrobatchOffload) -> int:
        moved = start(self)
        for journey in self._journeys:
            journey.box.drop()
        return moved

    def joins(self: MicrobatchOffload) -> int:
        self._join()
        self._place(PlaceOfBox.AWAY)
        return 0

    with patch.multiple(MicrobatchOffload, start_offload=starts, join_offload=joins):
        yield


@contextmanager
def given_back_at_the_start() -> Iterator[None]:
    start = MicrobatchOffload.start_fetch

    def starts(self: MicrobatchOffload) -> int:
        moved = start(self)
        if self._buffer is not None:
            self._lanes.buffers.give(self._buffer)
        self._buffer = None
        return moved

    with patch.object(MicrobatchOffload, "start_fetch", starts):
        yield


@contextmanager
def allocated_on_the_lane() -> Iterator[None]:
    def starts(self: MicrobatchOffload) -> int:
        def work() -> None:
            for journey in self._journeys:
                journey.box.flat = torch.empty(journey.box.bytes, dtype=torch.uint8)
            _copy([(journey.box.flat, journey.slot) for journey in self._journeys])

        self._handle = self._lanes.run(FROM_HOST, work)
        self._place(PlaceOfBox.COMING)
        return 0

    with patch.object(MicrobatchOffload, "start_fetch", starts):
        yield


@contextmanager
def event_before_the_copy() -> Iterator[None]:
    def made(self: HostCopy, tensor: Tensor) -> None:
        self._device = device = device_for(tensor.device)
        self._event = device.record()
        self.tensor = device.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self.tensor.copy_(tensor, non_blocking=True)

    with patch.object(HostCopy, "__init__", made):
        yield


@contextmanager
def fetched_unjoined() -> Iterator[None]:
    join = MicrobatchOffload.join_fetch

    def joins(self: MicrobatchOffload) -> None:
        self._handle = None
        join(self)

    with patch.object(MicrobatchOffload, "join_fetch", joins):
        yield


@contextmanager
def read_at_the_start() -> Iterator[None]:
    start = StageSnapshot.start

    def starts(self: StageSnapshot) -> int:
        moved = start(self)
        for copy in self._copies.values():
            copy.clone()
        return moved

    with patch.object(StageSnapshot, "start", starts):
        yield


@contextmanager
def never_joined() -> Iterator[None]:
    def joins(self: StageSnapshot) -> None:
        self._started, self._whole = False, True

    with patch.object(StageSnapshot, "join", joins):
        yield


class Fault(NamedTuple):
    """A planted fault. name: in words. run: the step that meets it.

    lane, at: the stream and the file that one finding must name. strict: it is found under ``strict`` alone.
    """

    name: str
    plant: Plant
    run: Callable[[], dict[str, Tensor]]
    lane: str
    at: str
    strict: bool = False


def exchanges() -> dict[str, Tensor]:
    return expert_steps("1f1b", {"P": 1, "M": 1}, "  alltoall flat\n")


def pairs() -> dict[str, Tensor]:
    """In a pair of cells what one sends is freed while the other computes."""
    return expert_steps("dualpipev", {"P": 1, "M": 2}, "  alltoall flat\n  overlap auto\n")


wait = partial(left_out, SimulatedEvent, "wait")
used_by = partial(left_out, SimulatedDevice, "used_by")
EXCHANGES, MOVES = "transport/collectives_in_process.py", "offload/microbatch.py"
SNAPSHOTS = "offload/snapshot.py"
FAULTS = (
    Fault(
        "a collective does not wait for compute",
        wait(SideStream.run),
        exchanges,
        "expert",
        EXCHANGES,
    ),
    Fault(
        "compute does not wait for a collective",
        wait(joined),
        exchanges,
        "expert",
        EXCHANGES,
    ),
    Fault(
        "what a collective takes is not recorded",
        used_by(SideStream.run),
        pairs,
        "expert",
        EXCHANGES,
    ),
    Fault(
        "the event of a collective is on compute",
        wrong_stream(SideStream.run),
        exchanges,
        "expert",
        EXCHANGES,
    ),
    Fault("a lane does not wait for compute", wait(StreamLanes.run), snapshot_steps, "d2h", SNAPSHOTS),
    Fault("compute does not wait for a lane", wait(StreamLanes.join), snapshot_steps, "h2d", MOVES),
    Fault(
        "the event of a lane is on compute",
        wrong_stream(StreamLanes.run),
        snapshot_steps,
        "h2d",
        MOVES,
    ),
    Fault(
        "storages are freed before the join of their offload",
        freed_at_the_start,
        snapshot_steps,
        "d2h",
        MOVES,
    ),
    Fault("a fetch is not joined", fetched_unjoined, snapshot_steps, "h2d", MOVES),
    Fault(
        "a host buffer is given back when its fetch starts",
        given_back_at_the_start,
        snapshot_steps,
        "h2d",
        MOVES,
    ),
    Fault(
        "the host reads sizes before the event",
        partial(patch.object, choice, "await_event", lambda device, event: None),
        exchanges,
        "host",
        "moe/sizes.py",
    ),
    Fault("the event of sizes comes before their copy", event_before_the_copy, exchanges, "host", "moe/sizes.py"),
    Fault("a snapshot is read before its copies", read_at_the_start, snapshot_steps, "d2h", SNAPSHOTS),
    Fault("a snapshot is never joined", never_joined, snapshot_steps, "d2h", SNAPSHOTS),
    Fault("what a collective gives is not recorded", used_by(joined), exchanges, "expert", EXCHANGES, strict=True),
    Fault(
        "fetched bytes are allocated on the lane",
        allocated_on_the_lane,
        snapshot_steps,
        "h2d",
        "offload/lanes.py",
        strict=True,
    ),
)
"""By name; those that are found under ``strict`` alone come last."""


MISSED_LATE = frozenset({
    "a collective does not wait for compute",
    "a host buffer is given back when its fetch starts",
    "a snapshot is read before its copies",
    "what a collective gives is not recorded",
    "fetched bytes are allocated on the lane",
})  # fmt: skip
"""Faults that change no bit where works run late: what comes too early for others is never early then."""


def tried(fault: Fault, strict: bool) -> Watched:
    """What a watched step finds with a fault planted. strict: as in `simulated_device`."""
    with fault.plant():
        return watched(fault.run, strict=strict)


def wrong(faults: Sequence[Fault] = FAULTS) -> list[str]:
    """Faults that are missed, found without ``strict`` where they do no harm, or found without lane, file and stage."""
    failed = []
    for fault in faults:
        seen = tried(fault, strict=False)
        if fault.strict:
            if seen.findings:
                failed.append(f"{fault.name}: found without strict: {seen.findings[0]}")
            seen = tried(fault, strict=True)
        named = [text for text in seen.findings if fault.lane in text.splitlines()[0] and fault.at in text]
        if not any("    in stage " in text for text in named):
            failed.append(f"{fault.name}: not found on {fault.lane} at {fault.at}, but: {seen.findings[:1]}")
    return failed


def bits_under_late(fault: Fault, expected: dict[str, Tensor]) -> bool:
    """Whether a step with a fault planted keeps its bits where works run as late as they may."""
    try:
        with fault.plant():
            values = late(fault.run)
    except (InstructionError, NonFiniteLoss):
        return False
    return all(torch.equal(value, expected[name]) for name, value in values.items())
