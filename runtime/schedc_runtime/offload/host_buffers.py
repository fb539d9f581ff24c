"""Host buffers for what leaves the device: pinned where that can be had, made once and used again."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_LEAST = 4096


class HostBuffers:
    """The host buffers of one rank.

    pinned: whether copies need pinned memory, which a GPU reads and writes beside its compute. Where it cannot be had,
    buffers are pageable, which is said once.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.held = 0
        """Bytes of all buffers."""
        self.used = 0
        """Bytes of the buffers that are in use."""
        self._free: list[Tensor] = []

    def take(self, count: int) -> Tensor:
        """[at least ``count``] uint8: a buffer, for `give` to take back."""
        fitting = [buffer for buffer in self._free if count <= buffer.nbytes <= max(2 * count, _LEAST)]
        if fitting:
            buffer = min(fitting, key=lambda buffer: buffer.nbytes)
            self._free = [free for free in self._free if free is not buffer]
        else:
            if self._free:  # all are of another size: let one of them go, so that their number does not grow
                unfit = min(self._free, key=lambda buffer: buffer.nbytes)
                self._free = [free for free in self._free if free is not unfit]
                self.held -= unfit.nbytes
            buffer = self._new(rounded(count))
            self.held += buffer.nbytes
        self.used += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer [bytes]. In stream order its copies come before its next use."""
        self.used -= buffer.nbytes
        self._free.append(buffer)

    def close(self) -> None:
        """Free the buffers that are not in use."""
        self.held -= sum(buffer.nbytes for buffer in self._free)
        self._free = []

    def _new(self, count: int) -> Tensor:
        if self.pinned:
            try:
                return torch.empty(count, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.pinned = False
                warnings.warn(
                    f"{count:,} bytes of pinned host memory cannot be had ({str(error).splitlines()[0]}): copies use"
                    " pageable memory, and the host waits for them; raise the limit of locked memory (ulimit -l),"
                    " or move less",
                    stacklevel=2,
                )
        return torch.empty(count, dtype=torch.uint8)


def rounded(count: int) -> int:
    """``count`` bytes rounded up by an eighth at most, so that nearly equal sizes share buffers."""
    step = max(_LEAST, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step
