"""A stored tensor: its shape, its type and how to read it, or some of its rows, into memory that exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from schedc_runtime.checkpoint.faults import refused

_CHUNK = 32 << 20
"""Bytes that are read at once where the target cannot take them directly."""


class Stored(Protocol):
    """One tensor of a checkpoint. shape, dtype: of the whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, target: Tensor, first: int = 0) -> None:
        """Write the rows from ``first`` on into ``target`` [rows, ...], as many as it has; it may have another type."""


@dataclass(frozen=True)
class InMemory:
    """A tensor [...] that is in memory already."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, target: Tensor, first: int = 0) -> None:
        """As `Stored.read`, for ``target`` [rows, ...]."""
        copy_rows(self.tensor, target, first)


@dataclass(frozen=True)
class InFile:
    """A contiguous tensor ``name``, little-endian, from byte ``offset`` of the file ``path`` on."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, target: Tensor, first: int = 0) -> None:
        """As `Stored.read`, for ``target`` [rows, ...]. Raises `MaterializeError` for a file that ends too early."""
        try:
            self._read(target, first)
        except (OSError, EOFError) as error:
            raise refused(self.path, error, self.name) from error

    def _read(self, target: Tensor, first: int) -> None:
        row = prod(self.shape[1:]) * self.dtype.itemsize
        place = self.offset + first * row
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if target.device.type == "cpu" and target.dtype == self.dtype and target.is_contiguous():
                _read_bytes(descriptor, target, place)
            elif target.dim() == 0 or not target.is_contiguous():
                whole = torch.empty(target.shape, dtype=self.dtype)
                _read_bytes(descriptor, whole, place)
                target.copy_(whole)
            else:
                _read_in_chunks(descriptor, target.view(-1), self.dtype, place)
        finally:
            os.close(descriptor)


def copy_rows(source: Tensor, target: Tensor, first: int) -> None:
    """Copy the rows from ``first`` on of ``source`` [all, ...] into ``target`` [rows, ...]."""
    target.copy_(source.narrow(0, first, len(target)) if target.dim() else source)


def _read_in_chunks(descriptor: int, flat: Tensor, dtype: torch.dtype, place: int) -> None:
    """Read into ``flat`` [n], of another type or on another device, through a small buffer."""
    pinned = flat.device.type == "cuda"
    chunk = max(1, _CHUNK // dtype.itemsize)
    buffer = torch.empty(min(chunk, len(flat)), dtype=dtype, pin_memory=pinned)
    for part in torch.split(flat, chunk):
        _read_bytes(descriptor, buffer[: len(part)], place)
        part.copy_(buffer[: len(part)])
        place += part.numel() * dtype.itemsize


def _read_bytes(descriptor: int, target: Tensor, place: int) -> None:
    """Fill ``target``, contiguous on the CPU, from byte ``place`` on."""
    if not target.numel():
        return
    view = target.view(-1).view(torch.uint8).numpy().data
    while len(view):
        count = os.preadv(descriptor, [view[: 1 << 30]], place)
        if not count:
            raise EOFError(f"the file ends before byte {place + len(view)}")
        view, place = view[count:], place + count
