"""One buffer for the rows of an exchange: what travels with a row lies beside it, and nothing is packed or unpacked.

    buffer [rows, bytes]     row 0: | H elements | k numbers of experts | k gates | padding |
                             row 1: | ...

The parts are strided views of the buffer. Rows are gathered into the views, the buffer is sent as it is, and the other
side reads views of what it got. Splits count rows. One buffer serves parts that travel to the same ranks row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowPart(NamedTuple):
    """What a part of a row is. shape: of its elements, () for a single number. start: its first byte in the row."""

    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


class RowFormat(NamedTuple):
    """The parts of a row. bytes: of a row, a multiple of every part's item."""

    parts: tuple[RowPart, ...]
    bytes: int

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> RowFormat:
        """The format of rows with a part for each tensor [rows, ...]: the same on all ranks, whatever their rows."""
        parts: list[RowPart] = []
        end = 0
        for tensor in tensors:
            start = _aligned(end, tensor.dtype.itemsize)
            parts.append(RowPart(tensor.dtype, tensor.shape[1:], start))
            end = start + parts[-1].bytes
        widest = max((part.dtype.itemsize for part in parts), default=1)
        return RowFormat(tuple(parts), _aligned(end, widest))

    def new_buffer(self, rows: int, device: torch.device) -> Tensor:
        """[rows, bytes] of uint8, to be written."""
        return torch.empty(rows, self.bytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The parts of a buffer [rows, bytes] of uint8, each [rows, ...]. They share its memory."""
        return tuple(
            buffer[:, part.start : part.start + part.bytes].view(part.dtype).view(len(buffer), *part.shape)
            for part in self.parts
        )


def buffer_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """[rows, bytes] of uint8: the buffer whose parts, in order, are ``tensors`` [rows, ...]; None if they have none."""
    form = RowFormat.of(tensors)
    first = tensors[0]
    storage, begin = first.untyped_storage(), first.storage_offset() * first.dtype.itemsize
    for part, tensor in zip(form.parts, tensors, strict=True):
        item = part.dtype.itemsize
        inner = torch.empty(part.shape, device="meta").stride()
        if (
            tensor.untyped_storage()._cdata != storage._cdata
            or tensor.storage_offset() * item != begin + part.start
            or len(tensor) != len(first)
            or (tensor.stride(0) * item, *tensor.stride()[1:]) != (form.bytes, *inner)
        ):
            return None
    whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
    return whole.as_strided((len(first), form.bytes), (form.bytes, 1), begin)


def _aligned(offset: int, item: int) -> int:
    return -(-offset // item) * item
