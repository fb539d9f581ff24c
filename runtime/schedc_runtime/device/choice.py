"""Says which device serves a tensor, and brings tensors to the host and back beside compute.

`device_for` is the only way to a device. A test may put another one in the place of the CPU (`stand_in`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from schedc_runtime.device import cuda as gpu
from schedc_runtime.device.base import ComputeDevice, DeviceEvent
from schedc_runtime.device.cpu import CpuDevice
from schedc_runtime.device.limits import await_event

__all__ = ["HostCopy", "brought", "device_for", "gpu", "stand_in"]

_STAND_INS: list[ComputeDevice] = []
"""Devices in the place of the CPU; the last one serves."""


def device_for(where: torch.device) -> ComputeDevice:
    """The device behind torch's name of it."""
    return _STAND_INS[-1] if _STAND_INS and where.type == "cpu" else _device(where)


@cache
def _device(where: torch.device) -> ComputeDevice:
    return gpu.GpuDevice(where) if where.type == gpu.TYPE else CpuDevice(where)


@contextmanager
def stand_in(device: ComputeDevice) -> Iterator[None]:
    """Let ``device`` serve the tensors of the CPU."""
    _STAND_INS.append(device)
    try:
        yield
    finally:
        _STAND_INS.remove(device)


class HostCopy:
    """A tensor [...] on its way from its device to the host, which goes on. What lies on a CPU is there at once."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = device = device_for(tensor.device)
        self._event: DeviceEvent | None = None
        self.tensor = tensor
        """The copy. The host may read it behind `join`."""
        if device.holds(tensor):
            self.tensor = device.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            self.tensor.copy_(tensor, non_blocking=True)
            self._event = device.record()

    def join(self) -> Tensor:
        """The copy [...] on the host, which waits for it. Raises `DeviceLate` behind the limit that holds."""
        if self._event is not None:
            await_event(self._device, self._event)
        return self.tensor


def brought(numbers: list[int], where: torch.device) -> Tensor:
    """[numbers] int64 on a device, in one copy that the host does not await."""
    device = device_for(where)
    if device.supports("streams"):
        return torch.tensor(numbers, dtype=torch.int64, device=where)
    pinned = device.host_memory(8 * len(numbers)).view(torch.int64)
    pinned.numpy()[:] = numbers
    return torch.empty(len(numbers), dtype=torch.int64, device=where).copy_(pinned, non_blocking=True)
