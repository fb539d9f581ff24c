"""RMSNorm in Triton: rows forward and backward, columns for the weight. `schedc_runtime.kernels.norm` says what."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.swiglu import as_rows

OPTIONS = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}
TILE = {"ROWS": 64, "BLOCK": 32, "num_warps": 4, "enable_fp_fusion": False}
"""Rows and columns that a program of the weight's gradient holds at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _forward(x, weight, eps, output, rstd, columns, x_row, EARLY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        number = tl.load(x + row * x_row + at, mask=at < columns, other=0.0).to(tl.float32)
        squares += number * number
    factor = 1 / tl.sqrt_rn(tl.sum(squares) / columns + eps)
    tl.store(rstd + row, factor)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        normal = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32) * factor
        if EARLY:
            normal = normal.to(output.dtype.element_ty).to(tl.float32)
        if weight is not None:
            normal = normal * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(output + row * columns + at, normal.to(output.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _of_normal(grad, weight, row, grad_row, at, inside, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    given = tl.load(grad + row * grad_row + at, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        given = given * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    return given.to(grad.dtype.element_ty).to(tl.float32) if EARLY else given


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    grad, x, weight, rstd, x_grad, columns, grad_row, x_row, EARLY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        number = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
        products += _of_normal(grad, weight, row, grad_row, at, inside, EARLY) * number
    factor = tl.load(rstd + row)
    of_mean = -0.5 * tl.sum(products) * (factor * factor * factor) / columns
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        number = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
        of_x = _of_normal(grad, weight, row, grad_row, at, inside, EARLY) * factor + of_mean * (number * 2)
        tl.store(x_grad + row * columns + at, of_x.to(x_grad.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _weight(  # type: ignore[no-untyped-def]
    grad,
    x,
    rstd,
    weight_grad,
    rows,
    columns,
    grad_row,
    x_row,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        given = tl.load(grad + row[:, None] * grad_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        number = tl.load(x + row[:, None] * x_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        normal = number * tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if EARLY:
            normal = normal.to(x.dtype.element_ty).to(tl.float32)
            products += (given * normal).to(x.dtype.element_ty).to(tl.float32)
        else:
            products += given * normal
    tl.store(weight_grad + at, tl.sum(products, 0).to(weight_grad.dtype.element_ty), mask=at < columns)


def launch_rms_rows(x: Tensor, weight: Tensor | None, eps: float, early: bool) -> tuple[Tensor, Tensor]:
    """The result [..., C], and rstd [..., 1]: as `schedc_runtime.kernels.norm.rms_rows_twin`."""
    output = x.new_empty(x.shape)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    rows = as_rows(x)
    if output.numel():
        _forward[(len(rows),)](
            rows, None if weight is None else weight.contiguous(), eps, output, rstd, x.shape[-1], rows.stride(0),
            EARLY=early, **OPTIONS,
        )  # fmt: skip
    return output, rstd


def launch_rms_rows_backward(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, early: bool) -> Tensor:
    """[..., C]: as `schedc_runtime.kernels.norm.rms_rows_backward_twin`."""
    x_grad = x.new_empty(x.shape)
    grads, rows = as_rows(grad), as_rows(x)
    if x_grad.numel():
        _backward[(len(rows),)](
            grads, rows, None if weight is None else weight.contiguous(), rstd, x_grad, x.shape[-1], grads.stride(0),
            rows.stride(0), EARLY=early, **OPTIONS,
        )  # fmt: skip
    return x_grad


def launch_rms_rows_weight(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, early: bool) -> Tensor:
    """[C]: as `schedc_runtime.kernels.norm.rms_rows_weight_twin`."""
    weight_grad = weight.new_empty(weight.shape)
    grads, rows = as_rows(grad), as_rows(x)
    if weight_grad.numel():
        _weight[(triton.cdiv(x.shape[-1], TILE["BLOCK"]),)](
            grads, rows, rstd, weight_grad, len(rows), x.shape[-1], grads.stride(0), rows.stride(0), EARLY=early, **TILE
        )
    return weight_grad
