"""Runs works of a simulated device as late as their waits allow, so that what nothing waits for has wrong values.

What a side stream computes holds NaN (the largest number, for whole numbers) until a wait demands it. A side stream
does not hold memory of others: freed memory is NaN to works that run afterwards. Copies from compute to the host
are late, too. A program with all its waits keeps its bits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc_runtime.device.order import WatchedLane

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operation, with its arguments."""


class LateWorks:
    """The works of each lane that have not run. A position in a lane is the number of works before it."""

    def __init__(self) -> None:
        self._waiting: dict[WatchedLane, deque[Callable[[], None]]] = {}
        self._done: dict[WatchedLane, int] = {}
        self._held: dict[WatchedLane, list[tuple[int, Any]]] = {}

    def position(self, lane: WatchedLane) -> int:
        """How many works the lane has been given."""
        return self._done.get(lane, 0) + len(self._waiting.get(lane, ()))

    def put(self, lane: WatchedLane, work: Callable[[], None]) -> None:
        """Give a lane a work."""
        self._waiting.setdefault(lane, deque()).append(work)

    def hold(self, lane: WatchedLane, tensor: Tensor) -> None:
        """Keep the memory of a tensor [...] until the works of a lane so far have run."""
        self._held.setdefault(lane, []).append((self.position(lane), tensor.untyped_storage()))

    def run(self, lane: WatchedLane, position: int) -> None:
        """Run the works of a lane up to a position."""
        waiting = self._waiting.get(lane, deque())
        while waiting and self._done.get(lane, 0) < position:
            waiting.popleft()()
            self._done[lane] = self._done.get(lane, 0) + 1
        if lane in self._held:
            self._held[lane] = [pair for pair in self._held[lane] if pair[0] > self._done.get(lane, 0)]

    def finish(self) -> None:
        """Run everything."""
        for lane in list(self._waiting):
            self.run(lane, self.position(lane))

    def defer(self, lane: WatchedLane, call: Call, written: list[Tensor], owns: Callable[[Tensor], bool]) -> Any:
        """The result of a call that runs later. written: its arguments [...] that it writes.

        owns: whether the lane may rely on the memory of a tensor [...].
        """
        func, args, kwargs = call
        if len(written) > 1:
            raise NotImplementedError(f"{func} writes {len(written)} tensors: late works write one")
        result = written[0] if written else func(*args, **kwargs)
        outputs = [] if written else [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        for output in outputs:
            poison(output)
        given = pytree.tree_map(lambda x: _weakly(x, owns) if isinstance(x, Tensor) else (lambda: x), (args, kwargs))

        def work() -> None:
            restored, named = pytree.tree_map(lambda get: get(), given)
            results = func(*restored, **named)
            for output, value in zip(outputs, pytree.tree_leaves(results), strict=False):
                output.copy_(value)

        self.put(lane, work)
        return result

    def defer_copy(self, lane: WatchedLane, target: Tensor, source: Tensor) -> Tensor:
        """A copy [...] from compute to the host: of the values that are there now."""
        values = source.clone()
        poison(target)

        def work() -> None:
            target.copy_(values)

        self.put(lane, work)
        return target


def poison(tensor: Tensor) -> None:
    """Fill a tensor [...] with what nobody should read."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def _weakly(tensor: Tensor, owns: Callable[[Tensor], bool]) -> Callable[[], Tensor]:
    """Gives a tensor [...] back, or a poisoned one where its memory was freed."""
    if owns(tensor):
        return lambda: tensor
    storage = weakref.ref(tensor.untyped_storage())
    dtype, place, size, stride = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def restored() -> Tensor:
        memory = storage()
        if memory is not None:
            return torch.empty(0, dtype=dtype).set_(memory, place, size, stride)
        lost = torch.empty_strided(size, stride, dtype=dtype)
        poison(lost)
        return lost

    return restored
