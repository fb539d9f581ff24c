"""A device with streams that is simulated on tensors of a CPU, for tests. The order of its works is watched.

    with simulated_device(lanes=["d2h"]):     # raises OrderFault, which names lanes, lines and remedies
        pipe = Pipeline(...)
        pipe.step(...)

Every operation runs at once, with the bits of a CPU. A dispatch mode tells `StreamOrder` which storages it reads and
writes on which stream. Memory of `host_memory` is pinned memory of the host; all other memory is the device's.

What is not simulated: the backward of an operation runs on the stream that is current then, and not on that of its
forward. Collectives of processes wait on the host, as gloo does.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.device.base import CapturedCall
from schedc_runtime.device.capture_rules import CaptureRules
from schedc_runtime.device.choice import stand_in
from schedc_runtime.device.cpu import CpuDevice
from schedc_runtime.device.late import LateWorks, poison
from schedc_runtime.device.operations import ASKING, ON_HOST, writes_of
from schedc_runtime.device.order import StreamOrder, WatchedLane, WatchedMemory
from schedc_runtime.device.places import place
from schedc_runtime.device.rule_calls import is_plain
from schedc_runtime.device.rules import DeviceRules, RuledOperations

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that allocate, and write nothing."""
_MOVES = frozenset({"set_", "resize_"})
"""Operations that change where a tensor lies, and neither read nor write."""


class SimulatedStream:
    """A stream of a simulated device."""

    def __init__(self, device: SimulatedDevice, lane: WatchedLane) -> None:
        self._device, self.lane = device, lane

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other.lane is self.lane

    def __hash__(self) -> int:
        return hash(self.lane)

    def synchronize(self) -> None:
        self._device.record(self).synchronize()


class SimulatedEvent:
    """An event of a simulated device."""

    def __init__(self, device: SimulatedDevice, lane: WatchedLane) -> None:
        self._device, self._lane, self._clock = device, lane, dict(lane.clock)
        self._capture = device.capture
        self.ends = not device.stopped
        self._position = device.late.position(lane) if device.late else 0

    def wait(self, stream: SimulatedStream) -> None:
        if self._device.capture is not None:
            self._device.capture.check_wait(stream.lane, self._capture is self._device.capture)
        stream.lane.follow(self._clock)
        if stream.lane is self._device.order.compute:
            self._reach()
        elif self._device.late:
            self._device.late.put(stream.lane, self._reach)

    def synchronize(self) -> None:
        if self._device.capture is not None:
            self._device.capture.check_host()
        self._device.order.host.follow(self._clock)
        self._reach()

    def _reach(self) -> None:
        """The device has come here: late works before this place have run."""
        if self._device.late:
            self._device.late.run(self._lane, self._position)

    def query(self) -> bool:
        return False  # a device may always be late


class SimulatedDevice(CpuDevice):
    """Streams over the kernels of a CPU. late: the works that have not run; None if works run at once.

    rules: the rules that operations follow; none by default.
    """

    def __init__(self, order: StreamOrder, late: LateWorks | None = None, rules: DeviceRules | None = None) -> None:
        super().__init__()
        self.order, self.late, self.rules = order, late, rules or DeviceRules(())
        self._known: dict[int, tuple[WatchedMemory, weakref.ref[Any]]] = {}
        self.capture: CaptureRules | None = None
        """The capture that runs now. Its graph is a tape."""
        self.stopped = False
        """Whether events recorded from now on never end, as behind a message that never comes."""

    def stream(self, name: str, high: bool = False) -> SimulatedStream:
        return SimulatedStream(self, self.order.lane(name))

    def current(self) -> SimulatedStream:
        return SimulatedStream(self, self.order.current)

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        before, self.order.current = self.order.current, stream.lane
        stream.lane.works += 1
        try:
            yield
        finally:
            self.order.current = before

    def record(self, stream: SimulatedStream | None = None) -> SimulatedEvent:
        return SimulatedEvent(self, self.order.current if stream is None else stream.lane)

    def reached(self, event: SimulatedEvent, seconds: float) -> bool:
        if event.ends:
            event.synchronize()
        else:
            time.sleep(seconds)
        return event.ends

    def used_by(self, tensor: Tensor, stream: SimulatedStream) -> None:
        if (memory := self._memory(tensor)) is not None:
            memory.announced.add(stream.lane.number)
            if self.late:
                self.late.hold(stream.lane, tensor)

    def host_memory(self, count: int) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            size = self.rules.block(count) if "pinned" in self.rules else count
            buffer = torch.empty(size, dtype=torch.uint8)
            if "pinned" in self.rules:
                weakref.finalize(buffer.untyped_storage(), self.rules.give, size)
            if "fresh" in self.rules:
                poison(buffer)
        if (memory := self._memory(buffer)) is not None:
            memory.host = True
        return buffer[:count]

    def lend(self, memory: Tensor) -> None:
        if (known := self._memory(memory)) is not None:
            known.host = True

    def holds(self, tensor: Tensor) -> bool:
        if not is_plain(tensor):
            return False
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is None or not known[0].host

    def supports(self, what: str) -> str:
        if what == "pinned memory" and "pageable" in self.rules:
            return "there is no pinned memory"
        simulated = what in ("streams", "pinned memory") or (what == "wide sums" and "decomposed" in self.rules)
        return "" if simulated else super().supports(what)

    def captured(self, call: Callable[[], Any], pool: Any, stream: Any = None, *, whole: bool = False) -> CapturedCall:
        stream = stream or self.stream("capture")
        self.record().wait(stream)
        self.capture = CaptureRules(self.order, stream.lane)
        try:
            captured = super().captured(call, pool, stream, whole=whole)
            self.capture.end()
        finally:
            self.capture = None
        self.record(stream).wait(self.current())
        return captured

    def is_captured(self) -> bool:
        return self.capture is not None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation: at once, or late on a side stream and on the way to the host."""
        order, late, name = self.order, self.late, func._schema.name.removeprefix("aten::")
        if late is None or func.is_view or name in _MOVES | _EMPTY:
            return func(*args, **kwargs)
        taken = list(_tensors((*args, *kwargs.values())))
        known = [memory for memory in map(self._memory, taken) if memory is not None]
        if order.current is not order.compute and taken:
            written = list(_tensors(_written(func, args, kwargs)))
            return late.defer(order.current, (func, args, kwargs), written, self._owns)
        if _crosses(known) and _may_be_late(name, args, kwargs) and not self.holds(args[0]):
            return late.defer_copy(order.compute, args[0], args[1])
        if name in ASKING and not all(memory.host for memory in known):
            late.run(order.compute, late.position(order.compute))
        return func(*args, **kwargs)

    def _owns(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor [...] belongs to the current stream or to the host."""
        memory = self._memory(tensor)
        return memory is None or memory.host or memory.allocated is self.order.current

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation was called. args, kwargs: what it was given. result: what it gave."""
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in _MOVES:
            return
        order, here = self.order, place()
        written = [self._memory(tensor) for tensor in _tensors(_written(func, args, kwargs))]
        read = [self._memory(tensor) for tensor in _tensors((*args, *kwargs.values()))]
        taken = [memory for memory in (*read, *written) if memory is not None]
        host = bool(taken) and all(memory.host for memory in taken)
        lane = order.host if host else order.current
        for tensor in _tensors((result,)):
            fresh = tensor.untyped_storage()._cdata not in self._known
            memory = self._memory(tensor)
            if fresh and memory is not None:
                memory.host = host
                if not host:
                    order.allocate(lane, name, here)
                if name not in _EMPTY:
                    written.append(memory)
        writes = {id(memory): memory for memory in written if memory is not None}
        reads = {id(memory): memory for memory in read if memory is not None and id(memory) not in writes}
        if reads or writes:
            order.operate(lane, name, here, reads.values(), writes.values())
        crosses = _crosses(taken)
        waits = crosses and "pageable" in self.rules
        if waits:
            self.rules.met["pageable"] += 1
        if not host and (name in ASKING or waits or (crosses and not _may_be_late(name, args, kwargs))):
            order.host.follow(lane.clock)

    def on_host(self, tensor: Tensor, what: str) -> None:
        """The host reads a tensor [...] by itself, and waits for the current stream where that holds it."""
        memory = self._memory(tensor)
        if memory is not None:
            lane = self.order.host if memory.host else self.order.current
            if self.late is not None and not memory.host:
                self.late.run(lane, self.late.position(lane))
            writes = [memory] if memory.host and what == "numpy" else []  # an array may be written
            self.order.operate(lane, what, place(), [memory], writes)
            self.order.host.follow(lane.clock)

    def _memory(self, tensor: Tensor) -> WatchedMemory | None:
        """The memory of a tensor [...]; None for one without bytes here."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        number = storage._cdata
        known = self._known.get(number)
        if known is not None:
            return known[0]
        if storage.device.type != "cpu" or not storage.nbytes():
            return None
        memory = WatchedMemory(self.order.current, place())

        def freed(_: Any) -> None:
            del self._known[number]
            self.order.free(memory, place())

        self._known[number] = memory, weakref.ref(storage, freed)
        return memory


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the device of every operation."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._device.run(func, args, kwargs or {})
        self._device.ran(func, args, kwargs or {}, result)
        return result


class _HostReads(TorchFunctionMode):
    """Tells the device of tensors that the host reads without an operation."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ON_HOST:
            self._device.on_host(args[0], func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def simulated_device(
    order: str = "watch", *, strict: bool = False, lanes: Iterable[str] = (), rules: str | Iterable[str] = ()
) -> Iterator[StreamOrder]:
    """Let a simulated device serve the tensors of the CPU. Build pipelines inside: they keep streams.

    order: ``watch`` finds works that no wait orders. ``late`` runs works as late as waits allow, and finds nothing by
    itself: compare bits with those of a run without it. strict: memory that other streams may use is a finding
    when it is freed, although nothing has allocated it again. lanes: names of streams that must have run works.
    rules: names of rules of a device (`device.rules.RULES`) that operations follow, each of which must be met; or
    ``every``: all under which a right program keeps its bits.

    Raises `OrderFault` at the end for findings, idle lanes and rules that were not met. An operation that a device
    refuses raises `DeviceFault`.
    """
    if order not in ("watch", "late"):
        raise ValueError(f"order={order!r}: possible: watch, late")
    late = LateWorks() if order == "late" else None
    ruled = DeviceRules(rules)
    device = SimulatedDevice(StreamOrder(strict, ruled.met), late, ruled)
    under = RuledOperations(ruled) if ruled.rules else nullcontext()
    with stand_in(device), _HostReads(device), under, _Operations(device):
        yield device.order
    if late is not None:
        late.finish()
        device.order.findings.clear()
    device.order.check(lanes, ruled.unmet())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [args[n] if n < len(args) else kwargs.get(name) for n, name in writes_of(func)]


def _crosses(memories: Iterable[WatchedMemory]) -> bool:
    """Whether memories lie on both sides."""
    return len({memory.host for memory in memories}) > 1


def _may_be_late(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy is one that the host does not wait for."""
    return name == "copy_" and bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
