"""RMSNorm: the operations with their twins, the gradient, and a module.

    x        [..., C]     rows
    weight   [C]          factor of each column; None: none
    rstd     [..., 1]     1 / sqrt(mean of a row's squares + eps), float32 or wider
    early    whether x * rstd is rounded to the dtype of x in front of the weight, as Hugging Face's models do
    result   [..., C]     x * rstd * weight, rounded to the dtype of x

The twins have the operations and the order of torch's RMSNorm on a CPU, and of those models, hence their bits. There
torch runs six operations forward and fourteen backward, and saves x * rstd besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.kernels.library import operation

_LAUNCHES = "norm"


def rms_rows_twin(x: Tensor, weight: Tensor | None, eps: float, early: bool) -> tuple[Tensor, Tensor]:
    """The result [..., C], and rstd [..., 1]."""
    if not early and (weight is None or weight.dtype is x.dtype):
        return torch._fused_rms_norm(x, x.shape[-1:], weight, eps)  # the same in one call, which a CPU takes to pieces
    wide = x.to(_wide(x))
    rstd = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    normal = (wide * rstd).to(x.dtype if early else wide.dtype)
    return (normal if weight is None else normal * weight).to(x.dtype), rstd


def rms_rows_backward_twin(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, early: bool) -> Tensor:
    """[..., C] the gradient of x."""
    wide, grad = x.to(rstd.dtype), grad.to(x.dtype if early else rstd.dtype)
    of_normal = (grad if weight is None else grad * weight).to(rstd.dtype)
    of_mean = (of_normal * wide).sum(-1, keepdim=True).mul_(-0.5).mul_(rstd.pow(3)).div_(x.shape[-1])
    return (of_normal * rstd).add_(of_mean * (wide * 2)).to(x.dtype)


def rms_rows_weight_twin(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, early: bool) -> Tensor:
    """[C] the gradient of the weight."""
    dtype = x.dtype if early else rstd.dtype
    products = grad.to(dtype) * (x.to(rstd.dtype) * rstd).to(dtype)
    return products.sum_to_size(weight.shape).to(weight.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


rms_rows = operation(
    "rms_rows(Tensor x, Tensor? weight, float eps, bool early) -> (Tensor, Tensor)",
    rms_rows_twin,
    f"{_LAUNCHES}:launch_rms_rows",
    lambda x, weight, eps, early: (x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=_wide(x))),
)
rms_rows_backward = operation(
    "rms_rows_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, bool early) -> Tensor",
    rms_rows_backward_twin,
    f"{_LAUNCHES}:launch_rms_rows_backward",
    lambda grad, x, weight, rstd, early: x.new_empty(x.shape),
)
rms_rows_weight = operation(
    "rms_rows_weight(Tensor grad, Tensor x, Tensor weight, Tensor rstd, bool early) -> Tensor",
    rms_rows_weight_twin,
    f"{_LAUNCHES}:launch_rms_rows_weight",
    lambda grad, x, weight, rstd, early: weight.new_empty(weight.shape),
)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, early: bool) -> Tensor:
        output, rstd = rms_rows(x, weight, eps, early)
        ctx.save_for_backward(x, weight, rstd)
        ctx.early = early
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_grad, weight_grad, *_ = ctx.needs_input_grad
        return (
            rms_rows_backward(grad, *ctx.saved_tensors, ctx.early) if x_grad else None,
            rms_rows_weight(grad, *ctx.saved_tensors, ctx.early) if weight_grad else None,
            None,
            None,
        )


def smallest_step(x: Tensor) -> float:
    """The eps of torch where none is given: the least step of the dtype in which sums over x [..., C] are formed."""
    return torch.finfo(_wide(x)).eps


def normalised(x: Tensor, weight: Tensor | None, eps: float | None, early: bool = False) -> Tensor:
    """[..., C] the RMSNorm of x [..., C], whose backward holds x and a number for each row.

    weight: [C] or None. eps: None for that of torch, the least step of the dtype in which sums are formed.
    """
    step = smallest_step(x) if eps is None else eps
    output: Tensor = _Normalised.apply(x, weight, step, early)  # type: ignore[no-untyped-call]
    return output


class OneLaunchRMSNorm(nn.RMSNorm):
    """torch's RMSNorm of the last dimension as one operation."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] to the same."""
        return normalised(x, self.weight, self.eps)
