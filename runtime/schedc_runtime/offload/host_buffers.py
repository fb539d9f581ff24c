"""Host buffers for what leaves the device: pinned where that can be had, made once and used again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import accumulate

from torch import Tensor

from schedc_runtime.device.base import ComputeDevice
from schedc_runtime.device.cpu import CpuDevice
from schedc_runtime.errors import RuntimeFault

_LEAST = 4096
_ALIGNED = 512
"""Bytes: every part of a buffer begins at a multiple of this."""


class HostBuffers:
    """The host buffers of one rank.

    device: the one that copies to the buffers and from there, a CPU by default. Where it has no pinned memory, buffers
    are pageable.
    """

    def __init__(self, device: ComputeDevice | None = None) -> None:
        self._device = device or CpuDevice()
        self.limit: float | None = None
        """The most bytes that may lie on the host; None for as many as it has."""
        self.slack = float("inf")
        """How many times as large as what lies in it a buffer may be: ``limit`` over the most that lies there."""
        self.name = "this rank"
        """What errors call the rank."""
        self.held = 0
        """Bytes of all buffers."""
        self.most = 0
        """The most bytes that all buffers have had."""
        self._free: list[Tensor] = []
        self._taken: dict[int, tuple[int, int]] = {}
        """By the `id` of a buffer in use: the bytes that were asked for, and how many of them are padding."""
        self._had_pinned = self._told = False

    @property
    def used(self) -> int:
        """Bytes of the buffers that are in use."""
        return self.held - sum(buffer.nbytes for buffer in self._free)

    @property
    def memory(self) -> str:
        """The kind of memory that the buffers have had."""
        if not self._device.supports("pinned memory"):
            return "pinned"
        return "in part pageable" if self._had_pinned else "pageable"

    def take(self, count: int, padding: int = 0) -> Tensor:
        """[at least ``count``] uint8: a buffer, for `give` to take back.

        padding: bytes of these between tensors; ``limit`` does not count them, since a plan knows nothing of them.
        Raises `RuntimeFault` where this and what is in use come to more than ``limit``.
        """
        room = None if self.limit is None else int(self.limit) + padding + sum(each for _, each in self._taken.values())
        self._check(count, room, padding)
        fitting = [buffer for buffer in self._free if count <= buffer.nbytes <= max(2 * count, _LEAST)]
        if fitting:
            buffer = min(fitting, key=lambda buffer: buffer.nbytes)
            self._free = [free for free in self._free if free is not buffer]
        else:
            if self._free:  # all are of another size: let one go, so that the number of buffers does not grow
                unfit = min(self._free, key=lambda buffer: buffer.nbytes)
                self._free = [free for free in self._free if free is not unfit]
                self.held -= unfit.nbytes
            buffer = self._new(self._size(count, room, padding))
            self.held += buffer.nbytes
            self.most = max(self.most, self.held)
        self._taken[id(buffer)] = count, padding
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer [bytes]. In stream order its copies come before its next use."""
        del self._taken[id(buffer)]
        self._free.append(buffer)

    def _check(self, count: int, room: int | None, padding: int) -> None:
        """room: the limit, and the padding of this buffer and those in use; None without a limit."""
        total = count + sum(taken for taken, _ in self._taken.values())
        if self.limit is not None and room is not None and total > room:
            raise RuntimeFault(
                f"{self.name} would have {total - room + int(self.limit):,} bytes on the host,"
                f" {count - padding:,} of them anew, and the plan says {int(self.limit):,}",
                "say more in `host`, or let less leave: `keep` more microbatches, or allow more `memory`",
            )

    def _size(self, count: int, room: int | None, padding: int) -> int:
        """Bytes of a new buffer for ``count`` bytes: rounded up as far as there is room, which is that of `_check`."""
        wanted = int(min(rounded(count), count + (count - padding) * (self.slack - 1)))
        if self.limit is None or room is None or self.held + wanted <= room:
            return wanted
        self.close()
        if self.held + count > room and not self._told:
            self._told = True
            warnings.warn(
                f"{self.name} holds {self.held + count:,} bytes of host buffers, and the plan says {int(self.limit):,}:"
                " buffers are larger than what lies in them, where microbatches differ",
                stacklevel=3,
            )
        return max(count, min(wanted, room - self.held))

    def close(self) -> None:
        """Free the buffers that are not in use."""
        self.held -= sum(buffer.nbytes for buffer in self._free)
        self._free = []

    def _new(self, count: int) -> Tensor:
        buffer = self._device.host_memory(count)
        self._had_pinned |= not self._device.supports("pinned memory")
        return buffer


def starts_in_buffer(sizes: Iterable[int]) -> list[int]:
    """[sizes + 1] where each part of a buffer begins, and where the last one ends. sizes: bytes of the parts."""
    return [*accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)]


def rounded(count: int) -> int:
    """``count`` bytes rounded up by an eighth at most, so that nearly equal sizes share buffers."""
    step = max(_LEAST, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step
