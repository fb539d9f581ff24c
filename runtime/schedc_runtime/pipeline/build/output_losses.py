"""A loss function for each output of a model; the loss of a microbatch is their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.errors import RuntimeFault, StageError
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, Loss, LossOfMicrobatch
from schedc_runtime.stage.forward import check_loss


class OutputLosses:
    """The losses of a model that returns a tuple of outputs, each with its function.

    A layout with an `L` per output calls each function in the stage of its output, else the last stage calls all.
    """

    def __init__(self, functions: Sequence[Callable[[Any, Any], Tensor]]) -> None:
        if not functions or not all(map(callable, functions)):
            raise RuntimeFault("loss_fn has no function for each output", "pass loss_fn=(first, second), or a function")
        if any(isinstance(function, ChunkedLoss) for function in functions):
            raise RuntimeFault(
                "loss_fn is one of several, and a ChunkedLoss",
                "a loss per output takes logits: loss_fn(output, target)",
            )
        self.functions = tuple(functions)

    def of_output(self, output: int, value: Any, target: Any) -> Tensor:
        """[] the loss of one output [rows, ...], which is ``value``: a mean over its microbatch."""
        loss = self.functions[output](value, target)
        if isinstance(loss, Loss):
            raise StageError(
                f"the loss function of output {output} returned a `Loss`, whose count is that of one output",
                "return a scalar tensor: the mean over one microbatch",
            )
        return check_loss(loss)

    def __call__(self, outputs: Any, target: Any) -> Tensor:
        """[] the sum over all outputs, in their order."""
        if not isinstance(outputs, (tuple, list)) or len(outputs) != len(self.functions):
            raise StageError(
                f"{len(self.functions)} loss functions for a model that returns a {type(outputs).__name__}"
                + (f" of {len(outputs)}" if isinstance(outputs, (tuple, list)) else ""),
                "return a tuple with one element for each function",
            )
        return reduce(torch.add, [self.of_output(number, value, target) for number, value in enumerate(outputs)])


def as_loss(loss_fn: LossOfMicrobatch | Sequence[Any] | None) -> LossOfMicrobatch | None:
    """The loss function of a microbatch, also of a sequence of functions."""
    return loss_fn if loss_fn is None or callable(loss_fn) else OutputLosses(loss_fn)


def check_losses(loss_fn: LossOfMicrobatch | None, losses: int, slices: Sequence[int]) -> None:
    """Refuse what cannot form losses in several stages. losses: their number. slices: [stages] as of a plan.

    Raises `RuntimeFault`.
    """
    if losses == 1 or loss_fn is None:
        return
    own = len(loss_fn.functions) if isinstance(loss_fn, OutputLosses) else 1
    if own != losses:
        raise RuntimeFault(
            f"the layout has {losses} losses, and loss_fn is {'one function' if own == 1 else f'{own} functions'}",
            "pass a function for each output: loss_fn=(first, second)",
        )
    if slices:
        raise RuntimeFault(
            f"{losses} losses in stages of their own, and microbatches in slices", "leave `slices` out, or write one L"
        )
