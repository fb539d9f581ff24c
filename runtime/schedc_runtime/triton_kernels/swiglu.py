"""SwiGLU in Triton: forward by row and block of columns, backward by row. `schedc_runtime.kernels.swiglu` says what."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}
"""BLOCK: columns that a program holds at once, eight for each thread."""


@triton.jit  # type: ignore[untyped-decorator]
def _with_bias(x, bias, ends, row, columns, experts, at, inside, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.cast(0, tl.int64)
    if ends is not None:
        number = tl.arange(0, EXPERTS)
        behind = tl.load(ends + number, mask=number < experts, other=2147483647) <= row
        expert = tl.minimum(tl.sum(behind.to(tl.int64)), experts - 1)
    added = tl.load(bias + expert * 2 * columns + at, mask=inside, other=0.0)
    return (x + added.to(tl.float32)).to(added.dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    gate, up, bias, ends, scale, output, columns, experts, EXPERTS: tl.constexpr, gate_row, up_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    dtype = output.dtype.element_ty
    g = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        g = _with_bias(g, bias, ends, row, columns, experts, at, inside, EXPERTS)
        u = _with_bias(u, bias + columns, ends, row, columns, experts, at, inside, EXPERTS)
    chosen = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
    inner = (chosen * u).to(dtype)
    if scale is not None:
        inner = (inner.to(tl.float32) * tl.load(scale + row).to(tl.float32)).to(dtype)
    tl.store(output + row * columns + at, inner, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    grad, gate, up, bias, ends, scale, gate_grad, up_grad, scale_grad, columns, experts,
    EXPERTS: tl.constexpr, grad_row, gate_row, up_row, gate_grad_row, up_grad_row, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype = gate_grad.dtype.element_ty
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        d = tl.load(grad + row * grad_row + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            g = _with_bias(g, bias, ends, row, columns, experts, at, inside, EXPERTS)
            u = _with_bias(u, bias + columns, ends, row, columns, experts, at, inside, EXPERTS)
        share = 1 / (1 + tl.exp(-g))
        chosen = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
        if scale_grad is not None:
            products += d * (chosen * u).to(dtype).to(tl.float32)
        if scale is not None:
            d = (d * tl.load(scale + row).to(tl.float32)).to(dtype).to(tl.float32)
        of_chosen = (d * u).to(dtype).to(tl.float32)
        tl.store(gate_grad + row * gate_grad_row + at, of_chosen * share * (1 + g * (1 - share)), mask=inside)
        tl.store(up_grad + row * up_grad_row + at, d * chosen, mask=inside)
    if scale_grad is not None:
        tl.store(scale_grad + row, tl.sum(products))


def launch_swiglu(
    gate: Tensor, up: Tensor, bias: Tensor | None = None, ends: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """[..., F]: as `schedc_runtime.kernels.swiglu.swiglu_twin`."""
    output = gate.new_empty(gate.shape)
    gate, up = as_rows(gate), as_rows(up)
    rows, columns = gate.shape
    if output.numel():
        _forward[(rows, triton.cdiv(columns, OPTIONS["BLOCK"]))](
            gate, up, *_whole(bias, ends, scale), output, columns, *_experts(ends), gate.stride(0), up.stride(0),
            **OPTIONS,
        )  # fmt: skip
    return output


def launch_swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, ends: Tensor | None, scale: Tensor | None,
    gate_grad: Tensor, up_grad: Tensor, scale_grad: Tensor | None,
) -> None:  # fmt: skip
    """Write gradients [..., F], and the scale's [...]: as `schedc_runtime.kernels.swiglu.swiglu_backward_twin`."""
    matrices = [*map(as_rows, (grad, gate, up)), *(x.view(-1, x.shape[-1]) for x in (gate_grad, up_grad))]
    rows, columns = matrices[0].shape
    if gate_grad.numel():
        given, outputs = matrices[:3], matrices[3:]
        _backward[(rows,)](
            *given, *_whole(bias, ends, scale), *outputs, scale_grad, columns, *_experts(ends),
            *(matrix.stride(0) for matrix in matrices), **OPTIONS,
        )  # fmt: skip


def as_rows(matrix: Tensor) -> Tensor:
    """[..., columns] as [rows, columns] whose columns lie side by side; a copy only where strides ask for one."""
    return (matrix if matrix.stride(-1) == 1 else matrix.contiguous()).reshape(-1, matrix.shape[-1])


def _whole(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    return (None if each is None else each.contiguous() for each in tensors)


def _experts(ends: Tensor | None) -> tuple[int, int]:
    """The number of experts, and a power of two that is not smaller."""
    count = 1 if ends is None else len(ends)
    return count, triton.next_power_of_2(count)
