"""Turns calls of activation functions, such as `functional.gelu`, into regions during the forward of a stage.

So are dropouts behind a recomputed attention, and the sum with a layer's input behind these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from schedc.ir.plan import Level
from schedc_runtime.recompute.regions import SUMS, behind_attention, region

ACTIVATIONS: frozenset[Any] = frozenset({
    *(getattr(functional, name) for name in (
        "celu", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
        "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "tanh", "tanhshrink",
    )),
    *(getattr(torch, name) for name in ("celu", "relu", "selu", "sigmoid", "tanh")),
    *(getattr(Tensor, name) for name in ("relu", "sigmoid", "tanh")),
})  # fmt: skip
"""torch's elementwise activation functions, without those that write in place."""


_BEHIND_ATTENTION = SUMS | {functional.dropout, torch.dropout}


class ActivationCalls(TorchFunctionMode):
    """Sees every call of a torch function on this thread. Entered only where a level recomputes activations."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BEHIND_ATTENTION and _recomputable(args, kwargs) and behind_attention(args):
            return region(Level.LAYER, partial(func, **kwargs) if kwargs and func not in SUMS else func, *args)
        if func not in ACTIVATIONS or not _recomputable(args, kwargs):
            return func(*args, **kwargs)
        return region(Level.ACT, partial(func, **kwargs) if kwargs else func, *args)


def _recomputable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call has a gradient and writes nothing in place."""
    in_place = kwargs.get("inplace") or any(arg is True for arg in args)
    return not in_place and bool(args) and isinstance(args[0], Tensor) and args[0].requires_grad
