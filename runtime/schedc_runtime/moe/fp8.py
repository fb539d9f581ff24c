"""Rows in fp8: rounding with a scale per row, products that apply scales behind them, and rows as they travel.

    rows [R, in]            a scale per row: the largest magnitude of the row is the largest number of fp8
    weights [E, in, out]    a scale per expert and column of the product

Both operands have as many scales as the product has rows and columns. So the scales are factors of whole sums. Forward
and input gradients are computed so. Weight gradients, which are sums over rows, keep the dtype of the rows.

Weights are rounded once in a step and once for each direction of the product (`RoundedWeights`), rows in each product.

Rows that travel have powers of two as scales. A row that was rounded so is not changed by another rounding: it is the
same whether it travels once or twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST = 1e-30
"""The least magnitude of a row that has a scale of its own."""


Rounded = tuple[Tensor, Tensor]
"""[..., rows, columns] numbers in fp8 and [..., rows] scales in float32."""


@torch.no_grad()
def rounded_rows(matrix: Tensor) -> Rounded:
    """[..., rows, columns] to numbers in fp8 of the same shape, by rows in memory, and the scales [..., rows] float32.

    A number times its row's scale is the number in ``matrix``, rounded. On a GPU no copy of ``matrix`` in float32 is
    made: one kernel divides and rounds.
    """
    narrow = matrix.float() if matrix.dtype is torch.float64 else matrix
    largest = torch.linalg.vector_norm(narrow, math.inf, dim=-1, keepdim=True)
    scale = largest.float().clamp_(min=_LEAST) / _LARGEST
    numbers = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    return torch.div(narrow, scale, out=numbers), scale.squeeze(-1)


def as_fp8(matrix: Tensor) -> Tensor:
    """[..., rows, columns] rounded to fp8 and back, in its own dtype."""
    return _unrounded(rounded_rows(matrix), matrix.dtype)


@torch.no_grad()
def _unrounded(rounded: Rounded, dtype: torch.dtype) -> Tensor:
    """[..., rows, columns] the numbers times their scales, multiplied in float32."""
    numbers, scale = rounded
    narrow = torch.float32 if dtype is torch.float64 else dtype
    result = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    return torch.mul(numbers.to(narrow), scale.unsqueeze(-1), out=result)


class RoundedWeights:
    """The weights of experts in fp8, each rounded once inside of `step`, and in each product outside of it.

    A weight is known by its storage, its place there, and its version, which each write raises. Between steps nothing
    is kept: not every write to a weight can be seen. Weights that no parameter has are rounded in each product.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._homes: dict[int, StorageWeakRef] = {}
        """By number of a parameter's storage: what keeps the number from being given again."""
        self._kept: dict[tuple[object, ...], Rounded] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep weights inside, until the end."""
        self._forget()
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1
            self._forget()

    def rounded(self, weights: Tensor) -> Rounded:
        """As the function, of the weights [E, rows, columns]."""
        key = self._key(weights) if self._steps else None
        if key is None:
            return rounded_rows(weights)
        if key not in self._kept:
            self._kept[key] = rounded_rows(weights)
        return self._kept[key]

    def as_fp8(self, weights: Tensor) -> Tensor:
        """As the function, of the weights [E, rows, columns]."""
        return _unrounded(self.rounded(weights), weights.dtype)

    def _key(self, weights: Tensor) -> tuple[object, ...] | None:
        """What tells weights from others: a parameter, or its copy in a narrower type, or a view of one; else None."""
        whole = weights if weights._base is None else weights._base
        node = whole.grad_fn
        copied = node is not None and node.name() == "ToCopyBackward0"
        source: Tensor = getattr(node.next_functions[0][0], "variable", whole) if node and copied else whole
        if source.is_inference():  # has no version
            return None
        storage = source.untyped_storage()
        if isinstance(source, nn.Parameter):
            self._homes.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        elif storage._cdata not in self._homes:  # autograd may give a parameter back as another tensor
            return None
        place = storage._cdata, source.storage_offset(), source.shape, source.stride(), source._version
        return *place, weights.dtype, weights.storage_offset(), weights.shape, weights.stride()

    def _forget(self) -> None:
        self._kept.clear()
        self._homes.clear()


WEIGHTS = RoundedWeights()
"""Those of this process. A step of any of its pipelines forgets them at its beginning and end."""


def packed_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
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


def unpacked_rows(numbers: Tensor, scale: Tensor) -> Tensor:
    """The rows [R, H] of `packed_rows`, rounded, in the dtype of ``scale`` [R]."""
    return numbers.to(scale.dtype) * scale.unsqueeze(-1)


def _least_exponent(dtype: torch.dtype) -> int:
    """The exponent of the least normal number, in float32 where that has fewer."""
    return int(math.log2(max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny)))


def fp8_products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[R, in] rows times [E, in, out] weights to [R, out] in the rows' dtype. ends: [E] int32, as of `RowGroups`."""
    numbers, scale = rounded_rows(rows)
    columns, column_scale = WEIGHTS.rounded(weights.transpose(1, 2))
    product: Tensor = torch._scaled_grouped_mm(
        numbers, columns.transpose(1, 2), scale, column_scale, offs=ends, out_dtype=rows.dtype, use_fast_accum=False
    )
    return product
