"""Providers of the loss: libraries that compute the cross entropy of a chunk's logits in place of torch's operations.

The adapter for Liger is written from its documented class `LigerCrossEntropyLoss`, and never ran on a GPU. It asks the
device for the number of rows that count, so that the host waits at each chunk and no graph holds a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.head_loss.chunks import LogitLoss
from schedc_runtime.providers import TORCH, Bits, ProviderTable, check_result, lacks_package


class LossCase(NamedTuple):
    """What a loss is chosen by. dtype: of the logits, float32 or float64. words: columns of the logits."""

    device: torch.device
    dtype: torch.dtype
    words: int


@dataclass(frozen=True)
class LossProvider:
    """A provider of the loss, as `AnyProvider`. loss: see `LogitLoss`."""

    name: str
    why_not: Callable[[LossCase], str]
    loss: LogitLoss
    bits: Bits = "own"
    kind: str = "loss"


def loss_for(name: str, case: LossCase) -> LogitLoss:
    """The loss of a provider, whose results are checked for shape and dtype.

    Raises `RuntimeFault` where it cannot serve the case.
    """
    provider = LOSSES.named(name, TORCH)
    if reason := provider.why_not(case):
        raise RuntimeFault(f"loss {name}: {reason}", 'leave providers={"loss": ...} out, and torch computes the loss')

    def checked(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        shape = logits.shape
        loss, gradient = provider.loss(logits, targets, ignored)
        check_result(provider, "the loss", loss, (), logits)
        check_result(provider, "the gradient", gradient, shape, logits)
        return loss, gradient

    return checked


def _not_liger(case: LossCase) -> str:
    if lack := lacks_package("liger-kernel", "liger_kernel", case.device):
        return lack
    if case.dtype is not torch.float32:
        return f"logits of {str(case.dtype).removeprefix('torch.')}: Liger computes in float32"
    return ""


def _liger(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    loss_fn = import_module("liger_kernel.transformers").LigerCrossEntropyLoss(ignore_index=ignored, reduction="sum")
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = loss_fn(leaf, targets)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


LOSSES = ProviderTable("loss", (LossProvider("liger", _not_liger, _liger),))
"""By name. Torch's operations (`schedc_runtime.head_loss.chunks`) compute the loss where nobody is named."""
