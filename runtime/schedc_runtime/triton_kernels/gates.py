"""Gradients of rows that were multiplied by a gate each, in Triton. `schedc_runtime.moe.stacked_linear` says what."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.swiglu import OPTIONS, as_rows


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_backward(  # type: ignore[no-untyped-def]
    unweighted, rows, gates, rows_grad, gates_grad, weighted, columns, unweighted_row, rows_row, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dtype = rows_grad.dtype.element_ty
    gate = tl.load(gates + row).to(tl.float32)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        d = tl.load(unweighted + row * unweighted_row + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(rows + row * rows_row + at, mask=inside, other=0.0).to(tl.float32)
        products += d * x
        tl.store(rows_grad + row * columns + at, (d * gate).to(dtype), mask=inside)
        if weighted is not None:
            tl.store(weighted + row * columns + at, (x * gate).to(dtype), mask=inside)
    tl.store(gates_grad + row, tl.sum(products))


def launch_weighted_backward(unweighted: Tensor, rows: Tensor, gates: Tensor, weighted: bool) -> list[Tensor]:
    """Gradients [R, columns] and [R], and rows [R, columns] times gates if ``weighted``: as the twin."""
    gradients = [unweighted.new_empty(rows.shape), gates.new_empty(gates.shape)]
    left, right = as_rows(unweighted), as_rows(rows)
    times = rows.new_empty(rows.shape) if weighted else None
    if rows.numel():
        _weighted_backward[(len(rows),)](
            left,
            right,
            gates.contiguous(),
            *gradients,
            times,
            rows.shape[1],
            left.stride(0),
            right.stride(0),
            **OPTIONS,
        )
    return gradients if times is None else [*gradients, times]
