"""Copies of rows, and their sums in a fixed order, in Triton. `schedc_runtime.moe.bags` says what.

permute    a program for each entry: it copies the entry's row of every part, or writes padding
combine    a program for each row of the last level and block of columns: it adds entries one after the other, each of
           which may be the sum of a level before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.numbers import veiled

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
BLOCK = 1024
_BYTES = {torch.bool: torch.uint8, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Dtypes that are copied as bytes: not every architecture has them."""


@triton.jit  # type: ignore[untyped-decorator]
def _permute(  # type: ignore[no-untyped-def]
    rows, at, blank, out, padding, counts, lengths, columns, row_strides, out_strides, BLOCK: tl.constexpr
):
    entry = tl.program_id(0)
    for part in tl.static_range(len(rows)):
        if entry < counts[part] >> 4:
            number = tl.load(at[part] + entry).to(tl.int64)
            copied = (number >= 0) & (number < lengths[part] >> 4)
            if blank[part] is not None:
                copied = copied & (tl.load(blank[part] + entry) == 0)
            source = rows[part] + number * row_strides[part]
            target = out[part] + entry.to(tl.int64) * out_strides[part]
            for start in range(0, columns[part], BLOCK):
                across = start + tl.arange(0, BLOCK)
                inside = across < columns[part]
                empty = tl.full((BLOCK,), padding[part] >> 4, rows[part].dtype.element_ty)
                row = tl.load(source + across, mask=inside & copied, other=0)
                tl.store(target + across, tl.where(copied, row, empty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _bag(  # type: ignore[no-untyped-def]
    summands, at, offsets, bags, entries, rows, length, row_stride, number, across, inside, LEVEL: tl.constexpr
):
    begin = tl.load(offsets[LEVEL] + number)
    end = tl.load(offsets[LEVEL] + number + 1, mask=number + 1 < bags[LEVEL] >> 4, other=entries[LEVEL] >> 4)
    total = tl.zeros(across.shape, dtype=tl.float32)
    for entry in range(begin, end):
        index = tl.load(at[LEVEL] + entry).to(tl.int64)
        if LEVEL == 0:
            here = inside & (index >= 0) & (index < length)
            total += tl.load(summands + index * row_stride + across, mask=here, other=0.0).to(tl.float32)
        elif (index >= 0) & (index < rows[LEVEL - 1] >> 4):
            total += _bag(
                summands, at, offsets, bags, entries, rows, length, row_stride, index, across, inside, LEVEL - 1
            )
    return total.to(summands.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    summands, at, offsets, result, bags, entries, rows, length, columns, row_stride,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    across = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = across < columns
    total = _bag(summands, at, offsets, bags, entries, rows, length, row_stride, number, across, inside, LEVELS - 1)
    tl.store(result + number * columns + across, total.to(result.dtype.element_ty), mask=inside)


def launch_permute(
    rows: Sequence[Tensor], at: Sequence[Tensor], blank: Sequence[Tensor | None], padding: Sequence[int],
    out: Sequence[Tensor],
) -> Any:  # fmt: skip
    """Write to each of ``out`` [copies, ...] the rows ``at`` [copies] of ``rows`` [...], or padding."""
    counts = tuple(len(index) for index in at)
    if not max(counts, default=0):
        return None
    if any(number for part, number in zip(rows, padding, strict=True) if part.dtype in _BYTES):
        return NotImplemented
    left = tuple(_near(part.view(_BYTES.get(part.dtype, part.dtype))) for part in rows)
    right = tuple(_matrix(part.view(_BYTES.get(part.dtype, part.dtype))) for part in out)
    _permute[(max(counts),)](
        left, tuple(at), tuple(None if mask is None else mask.view(torch.uint8) for mask in blank), right,
        veiled(padding), veiled(counts), veiled(map(len, left)), tuple(matrix.shape[1] for matrix in right),
        tuple(matrix.stride(0) for matrix in left), tuple(matrix.stride(0) for matrix in right), BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip
    return None


def launch_combine(summands: Tensor, at: Sequence[Tensor], offsets: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """[summands, ...] to [rows of the last level, ...]: as the twin, level by level in registers."""
    result = summands.new_empty(rows[-1], *summands.shape[1:])
    matrix = _near(summands)
    columns = matrix.shape[1]
    if result.numel():
        block = min(BLOCK, max(16, triton.next_power_of_2(columns)))
        _combine[(rows[-1], triton.cdiv(columns, block))](
            matrix, tuple(at), tuple(offsets), result, veiled(map(len, offsets)), veiled(map(len, at)), veiled(rows),
            len(matrix), columns, matrix.stride(0), LEVELS=len(at), BLOCK=block, **OPTIONS,
        )  # fmt: skip
    return result


def _matrix(tensor: Tensor) -> Tensor:
    """[rows, ...] as [rows, columns], without a copy."""
    return tensor.view(len(tensor), tensor.shape[1:].numel())


def _near(tensor: Tensor) -> Tensor:
    """[rows, ...] as [rows, columns] whose columns lie side by side."""
    matrix = tensor.reshape(len(tensor), tensor.shape[1:].numel())
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()
