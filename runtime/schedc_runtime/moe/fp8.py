"""Rows in fp8: rounding with a scale per row, products that apply scales behind them, and rows as they travel.

    rows [R, in]            a scale per row: the largest magnitude of the row is the largest number of fp8
    weights [E, in, out]    a scale per expert and column of the product

Both operands have as many scales as the product has rows and columns. So the scales are factors of whole sums. Forward
and input gradients are computed so. Weight gradients, which are sums over rows, keep the dtype of the rows.

Rows that travel have powers of two as scales. A row that was rounded so is not changed by another rounding: it is the
same whether it travels once or twice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST = 1e-30
"""The least magnitude of a row that has a scale of its own."""


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[..., rows, columns] to numbers in fp8 of the same shape, by rows in memory, and the scales [..., rows] float32.

    A number times its row's scale is the number in ``matrix``, rounded.
    """
    wide = matrix.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_(min=_LEAST) / _LARGEST
    return (wide / scale).to(FP8).contiguous(), scale.squeeze(-1)


def as_fp8(matrix: Tensor) -> Tensor:
    """[..., rows, columns] rounded to fp8 and back, in its own dtype."""
    numbers, scale = rounded(matrix)
    return (numbers.float() * scale.unsqueeze(-1)).to(matrix.dtype)


def packed(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R, H] to numbers in fp8 [R, H] and the rows' scales [R] in their dtype, powers of two.

    A number times its row's scale is the number in ``rows``, rounded. A row with a number that is not finite becomes
    NaN as a whole.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    mantissa, exponent = (largest / _LARGEST).frexp()  # between 1/2 and 1, times 2 ** exponent
    exponent = exponent.add_(mantissa == 0.5, alpha=-1).clamp_(min=_least_exponent(rows.dtype))
    scale = torch.ldexp(largest * 0 + 1, exponent)
    return (wide / scale.unsqueeze(-1)).to(FP8), scale.to(rows.dtype)


def unpacked(numbers: Tensor, scale: Tensor) -> Tensor:
    """The rows [R, H] of `packed`, rounded, in the dtype of ``scale`` [R]."""
    return numbers.to(scale.dtype) * scale.unsqueeze(-1)


def _least_exponent(dtype: torch.dtype) -> int:
    """The exponent of the least normal number, in float32 where that has fewer."""
    return int(math.log2(max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny)))


def fp8_products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[R, in] rows times [E, in, out] weights to [R, out] in the rows' dtype. ends: [E] int32, as of `RowGroups`."""
    numbers, scale = rounded(rows)
    columns, column_scale = rounded(weights.transpose(1, 2))
    product: Tensor = torch._scaled_grouped_mm(
        numbers, columns.transpose(1, 2), scale, column_scale, offs=ends, out_dtype=rows.dtype, use_fast_accum=False
    )
    return product
