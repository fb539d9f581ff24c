"""Products of experts as Triton kernels, where Triton is installed: rows times weights, and weight gradients.

    rows x weights       a program for each tile of rows of one expert, and of columns. It looks its expert up in the
                         ends, so that the numbers of rows stay on the device
    rows x gradients     a program for each expert and tile of its weight, which goes through the expert's rows

Sums are in float32, whatever the dtype. They run over tiles in order, so that the same rows give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, INNER = 64, 64, 32
"""Sizes of a tile."""
OPTIONS = {"enable_fp_fusion": False}
"""Options of the compiler, whose own choice changes with Triton 3.10: sums have the same bits in each version."""


@triton.jit  # type: ignore[untyped-decorator]
def _rows_times_weights(  # type: ignore[no-untyped-def]
    left, right, output, ends, experts, inner, columns,
    left_row, left_column, right_expert, right_row, right_column, output_row,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INNER: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0)
    expert, first, last, seen, begin = -1, 0, 0, 0, 0
    for number in range(experts):
        end = tl.load(ends + number)
        tiles = (end - begin + TILE_ROWS - 1) // TILE_ROWS
        if (tile >= seen) & (tile < seen + tiles):
            expert, first, last = number, begin + (tile - seen) * TILE_ROWS, end
        seen += tiles
        begin = end
    if expert >= 0:
        rows = first + tl.arange(0, TILE_ROWS)
        across = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
        for start in range(0, inner, TILE_INNER):
            along = start + tl.arange(0, TILE_INNER)
            here = (rows[:, None] < last) & (along[None, :] < inner)
            there = (along[:, None] < inner) & (across[None, :] < columns)
            at_left = rows[:, None].to(tl.int64) * left_row + along[None, :] * left_column
            at_right = tl.cast(expert, tl.int64) * right_expert + along[:, None] * right_row
            a = tl.load(left + at_left, mask=here, other=0.0)
            b = tl.load(right + at_right + across[None, :] * right_column, mask=there, other=0.0)
            total += tl.dot(a, b, input_precision="ieee")
        inside = (rows[:, None] < last) & (across[None, :] < columns)
        at = rows[:, None].to(tl.int64) * output_row + across[None, :]
        tl.store(output + at, total.to(output.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_times_gradients(  # type: ignore[no-untyped-def]
    left, right, output, ends, inner, columns,
    left_row, left_column, right_row, right_column, output_expert, output_row, output_column,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INNER: tl.constexpr,
) -> None:  # fmt: skip
    expert = tl.program_id(0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    along = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    across = tl.program_id(2) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    for start in range(begin, end, TILE_INNER):
        rows = start + tl.arange(0, TILE_INNER)
        here = (along[:, None] < inner) & (rows[None, :] < end)
        there = (rows[:, None] < end) & (across[None, :] < columns)
        a = tl.load(left + rows[None, :].to(tl.int64) * left_row + along[:, None] * left_column, mask=here, other=0.0)
        b = tl.load(
            right + rows[:, None].to(tl.int64) * right_row + across[None, :] * right_column, mask=there, other=0.0
        )
        total += tl.dot(a, b, input_precision="ieee")
    inside = (along[:, None] < inner) & (across[None, :] < columns)
    at = tl.cast(expert, tl.int64) * output_expert + along[:, None] * output_row + across[None, :] * output_column
    tl.store(output + at, total.to(output.dtype.element_ty), mask=inside)


def triton_products(left: Tensor, right: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """As `schedc_runtime.moe.products.Multiply` says, with ends [E] int32 on the device in place of groups."""
    left, right = _near(left), _near(right)
    experts, (rows, inner), columns = len(weight), left.shape, right.shape[-1]
    tiles = {"TILE_ROWS": ROWS, "TILE_COLUMNS": COLUMNS, "TILE_INNER": INNER, **OPTIONS}
    if right.dim() == 3:
        result = left.new_empty(rows, columns)
        over_rows = (triton.cdiv(rows, ROWS) + experts, triton.cdiv(columns, COLUMNS))
        _rows_times_weights[over_rows](
            left, right, result, ends, experts, inner, columns, *left.stride(), *right.stride(), columns, **tiles
        )
        return result
    result = torch.empty_like(weight)
    grid = (experts, triton.cdiv(inner, ROWS), triton.cdiv(columns, COLUMNS))
    _rows_times_gradients[grid](
        left, right, result, ends, inner, columns, *left.stride(), *right.stride(), *result.stride(), **tiles
    )
    return result


def _near(matrix: Tensor) -> Tensor:
    """[..., columns] the same, with columns so near that the kernels' int32 holds their offsets in a row."""
    return matrix if matrix.stride(-1) * matrix.shape[-1] < 2**31 else matrix.contiguous()
