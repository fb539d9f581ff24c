"""Chains as functions with a backward of their own: each holds its inputs, and makes the rest again.

Forward and backward are written as plain functions of tensors, in the operations and the order of autograd, which keep
its bits. `pair` makes a function with a backward of both, and its twin whose two parts torch.compile makes kernels of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.device.choice import device_for
from schedc_runtime.kernels.rotary import rotary, rotary_backward, rotate
from schedc_runtime.kernels.swiglu import gated_gradients, swiglu

Plain = Callable[..., Any]
T = TypeVar("T")


def fused_gated(gate: Tensor, up: Tensor) -> Tensor:
    """[...] silu(gate) * up."""
    return functional.silu(gate) * up


def gated_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """[...] the gradients of gate and up."""
    return torch.ops.aten.silu_backward(gradient * up, gate), gradient * functional.silu(gate)


def fused_bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """[..., F] gelu(x + bias). bias: [F]."""
    return functional.gelu(x + bias, approximate=approximate)


def bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """[..., F] the gradient of x; that of the bias is its sum over rows."""
    of_sum: Tensor = torch.ops.aten.gelu_backward(gradient, x + bias, approximate=approximate)
    return of_sum


def fused_dropout_add(x: Tensor, rest: Tensor, mask: Tensor, p: float) -> Tensor:
    """[...] rest + x * mask / (1 - p). mask: [...] bool, what stays."""
    return rest + x * mask.to(x.dtype).div_(1 - p)


def dropout_add_backward(gradient: Tensor, mask: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """[...] the gradient of x, whose numbers are of ``dtype``."""
    return gradient * mask.to(dtype).div_(1 - p)


@cache
def _kernel(function: Plain) -> Plain:
    """``function`` by torch.compile, which is loaded only here."""
    compiled: Plain = torch.compile(function, fullgraph=True, dynamic=None)
    return compiled


def _run(function: Callable[..., T], compiled: bool, *args: Any) -> T:
    if not compiled:
        return function(*args)
    result: T = _kernel(function)(*(x.detach() if isinstance(x, Tensor) else x for x in args))
    return result


class Rotary(torch.autograd.Function):
    """`rotary`. Holds cos and sin, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, compiled: bool) -> Tensor:
        """[..., d] the rotated x."""
        ctx.save_for_backward(cos, sin)
        ctx.compiled = compiled
        result: Tensor = _run(rotary, True, x, cos, sin) if compiled else rotate(x, cos, sin, False)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """[..., d] the gradient of x."""
        cos, sin = ctx.saved_tensors
        if not ctx.compiled:
            return rotate(gradient, cos, sin, True), None, None, None
        return _run(rotary_backward, True, gradient, cos, sin), None, None, None


class Gated(torch.autograd.Function):
    """`fused_gated`. Holds gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, compiled: bool) -> Tensor:
        """[...] silu(gate) * up."""
        ctx.save_for_backward(gate, up)
        ctx.compiled = compiled
        result: Tensor = _run(fused_gated, True, gate, up) if compiled else swiglu(gate, up)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """[...] the gradients of gate and up."""
        if not ctx.compiled:
            return *gated_gradients(gradient, *ctx.saved_tensors), None
        return *_run(gated_backward, True, gradient, *ctx.saved_tensors), None


class BiasGelu(torch.autograd.Function):
    """`fused_bias_gelu`. Holds x and the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str, compiled: bool) -> Tensor:
        """[..., F] gelu(x + bias)."""
        ctx.save_for_backward(x, bias)
        ctx.settings = approximate, compiled
        return _run(fused_bias_gelu, compiled, x, bias, approximate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """[..., F] the gradient of x, and [F] of the bias."""
        (x, bias), (approximate, compiled) = ctx.saved_tensors, ctx.settings
        of_x = _run(bias_gelu_backward, compiled, gradient, x, bias, approximate)
        return of_x, of_x.sum_to_size(bias.shape) if ctx.needs_input_grad[1] else None, None, None


class DropoutAdd(torch.autograd.Function):
    """rest + dropout(x), with the draw of `functional.dropout`. Holds a byte for each number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rest: Tensor, p: float, compiled: bool) -> Tensor:
        """[...] rest + dropout(x)."""
        ctx.settings = p, compiled, x.dtype
        if not device_for(x.device).supports("native dropout"):
            dropped, mask = torch.native_dropout(x, p, True)
            ctx.save_for_backward(mask)
            return rest + dropped
        mask = torch.empty_like(x).bernoulli_(1 - p).bool()
        ctx.save_for_backward(mask)
        return _run(fused_dropout_add, compiled, x, rest, mask, p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """[...] the gradients of x and of the rest."""
        (mask,), (p, compiled, dtype) = ctx.saved_tensors, ctx.settings
        if not device_for(gradient.device).supports("native dropout"):
            return torch.ops.aten.native_dropout_backward(gradient, mask, 1 / (1 - p)), gradient, None, None
        return _run(dropout_add_backward, compiled, gradient, mask, p, dtype), gradient, None, None
