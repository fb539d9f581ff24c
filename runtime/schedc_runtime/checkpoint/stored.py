"""A stored tensor: shape, type, and a read of the tensor or of some rows into existing memory.

Faults of checkpoints name the file, the tensor and the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from schedc_runtime.checkpoint.pickled import UnknownName
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.saved.plain import refused
from schedc_runtime.saved.safetensors import FileSpan


@contextmanager
def reading(path: Path | str, name: str = "") -> Iterator[None]:
    """Turns whatever a reader raises for the bytes of a file into a `MaterializeError`.

    The first error is not chained: torch's own advises to read the file without any check.
    """
    try:
        yield
    except RuntimeFault:
        raise
    except UnknownName as error:
        raise MaterializeError(
            f"{path} asks for `{error}`, which no checkpoint needs; nothing of the file was run",
            "save the state dict alone: model.state_dict(), with tensors and plain values",
        ) from None
    except Exception as error:
        raise refused(path, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", name) from None


def inside_file(folder: Path, name: object) -> Path:
    """The file ``name`` of a checkpoint's folder.

    Raises `ValueError` if it lies elsewhere. Links may lead into the store of Hugging Face's cache, where files of a
    checkpoint lie in `blobs` beside its `snapshots`.
    """
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name of a file")
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    path = folder / name
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{name!r} lies outside of the checkpoint's own folder {folder}")
    return path


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


TENSOR_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
}  # fmt: skip
TYPE_NAMES = {dtype: name for name, dtype in TENSOR_TYPES.items()}
"""The name of each type in a safetensors file."""


def in_span(path: Path, name: str, span: FileSpan) -> InFile:
    """The tensor ``name`` that lies in a span of the file ``path``."""
    return InFile(str(path), span.begin, span.shape, TENSOR_TYPES[span.dtype], name)


def whole_tensor(stored: Stored) -> Tensor:
    """[...] all of a stored tensor, in memory."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read(tensor)
    return tensor


def copy_rows(source: Tensor, target: Tensor, first: int) -> None:
    """Copy the rows from ``first`` on of ``source`` [all, ...] into ``target`` [rows, ...]."""
    target.copy_(source.narrow(0, first, len(target)) if target.dim() else source)


def read_box(tensor: Tensor, offset: Sequence[int], shape: Sequence[int], stored: Stored) -> None:
    """Fill ``tensor`` [...], which begins at ``offset`` of the whole tensor of ``shape``."""
    if not tensor.numel():
        return None
    if tuple(tensor.shape[1:]) == tuple(shape[1:]):
        return stored.read(tensor, *offset[:1])
    rows = torch.empty((len(tensor), *shape[1:]), dtype=tensor.dtype)
    stored.read(rows, offset[0])
    for axis in range(1, tensor.dim()):
        rows = rows.narrow(axis, offset[axis], tensor.shape[axis])
    tensor.copy_(rows)
    return None


def _read_in_chunks(descriptor: int, flat: Tensor, dtype: torch.dtype, place: int) -> None:
    """Read into ``flat`` [n], of another type or on another device, through a small buffer."""
    chunk = max(1, _CHUNK // dtype.itemsize)
    buffer = device_for(flat.device).host_memory(min(chunk, len(flat)) * dtype.itemsize).view(dtype)
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
