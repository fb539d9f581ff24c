"""SwiGLU, silu(gate) * up, with a bias by expert and a scale by row: the operations, their twins and the gradient.

    gate, up    [..., F]     each with any strides: halves of one [..., 2F] need no copy
    bias        [E, 2F]      added to gate and up of the rows of an expert, that of the gate first; None: none
    ends        [E] int32    index of the row behind each expert's last; None: one expert has all rows
    scale       [...]        factor of each row; None: none
    result      [..., F]     scale * (silu(gate + bias) * (up + bias))

Rounding is that of torch's operations, one after the other: a bfloat16 is rounded behind each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.kernels.library import operation


def _biased(gate: Tensor, up: Tensor, bias: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """[..., F] gate and up with the bias of each row's expert; the last expert's for rows behind its end."""
    if bias is None:
        return gate, up
    added = bias[0]
    if ends is not None:
        rows = torch.arange(gate.shape[:-1].numel(), device=gate.device, dtype=ends.dtype)
        expert = torch.bucketize(rows, ends, right=True).clamp_(max=len(ends) - 1)
        added = bias.index_select(0, expert).view(*gate.shape[:-1], bias.shape[-1])
    first, second = added.chunk(2, -1)
    return gate + first, up + second


def swiglu_twin(
    gate: Tensor, up: Tensor, bias: Tensor | None = None, ends: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """[..., F]: see the top."""
    gate, up = _biased(gate, up, bias, ends)
    inner = functional.silu(gate) * up
    return inner if scale is None else (inner * scale.unsqueeze(-1)).to(inner.dtype)


def swiglu_backward_twin(
    grad: Tensor, gate: Tensor, up: Tensor, bias: Tensor | None, ends: Tensor | None, scale: Tensor | None,
    gate_grad: Tensor, up_grad: Tensor, scale_grad: Tensor | None,
) -> None:  # fmt: skip
    """Write the gradients of gate and up [..., F], which are those of the bias by row, and of the scale [...]."""
    gate, up = _biased(gate, up, bias, ends)
    chosen = functional.silu(gate)
    if scale_grad is not None:
        wide = torch.promote_types(grad.dtype, scale_grad.dtype)
        scale_grad.copy_((grad.to(wide) * (chosen * up)).sum(-1))
    if scale is not None:
        grad = (grad * scale.unsqueeze(-1)).to(grad.dtype)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
    torch.mul(grad, chosen, out=up_grad)


swiglu = operation(
    "swiglu(Tensor gate, Tensor up, Tensor? bias=None, Tensor? ends=None, Tensor? scale=None) -> Tensor",
    swiglu_twin,
    "swiglu:launch_swiglu",
    lambda gate, up, *_, **__: gate.new_empty(gate.shape),
)
swiglu_backward = operation(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor? bias, Tensor? ends, Tensor? scale,"
    " Tensor(a!) gate_grad, Tensor(b!) up_grad, Tensor(c!)? scale_grad) -> ()",
    swiglu_backward_twin,
    "swiglu:launch_swiglu_backward",
    lambda *_: None,
)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """[..., F] silu(gate) * up. The backward holds only ``gate`` and ``up``."""
    output: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


def gated_halves(both: Tensor) -> Tensor:
    """[..., 2F] to [..., F]: `gated` of its halves. The backward holds only ``both``."""
    output: Tensor = _GatedHalves.apply(both)  # type: ignore[no-untyped-call]
    return output


def gated_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """[..., F] the gradients of gate and up."""
    gradients = grad.new_empty(gate.shape), grad.new_empty(up.shape)
    swiglu_backward(grad, gate, up, None, None, None, *gradients, None)
    return gradients


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        result: Tensor = swiglu(gate, up)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gated_gradients(grad, *ctx.saved_tensors)


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        result: Tensor = swiglu(*both.chunk(2, -1))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gradient = grad.new_empty(both.shape)
        swiglu_backward(grad, *both.chunk(2, -1), None, None, None, *gradient.chunk(2, -1), None)
        return gradient
