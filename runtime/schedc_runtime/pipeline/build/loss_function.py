"""What a loss function may return, and the call that a last stage makes of it: a sum with its count, or a mean."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc_runtime.errors import StageError
from schedc_runtime.pipeline.agree.counts import CountOfTargets
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, Loss, LossOfMicrobatch, Weighing, labels_of
from schedc_runtime.pipeline.build.output_losses import OutputLosses
from schedc_runtime.stage.base import LossFunction
from schedc_runtime.stage.forward import check_loss


class Expected(NamedTuple):
    """What a last stage compares an output with.

    number: that of the microbatch; those of replica r begin at r * M. target: second argument of the loss function.
    rows: rows of the output that belong to the batch; the rest are repeated. padded: all its rows; 0 if none are known.
    """

    number: int
    target: Any
    rows: int
    padded: int


class Formed(NamedTuple):
    """The loss of a microbatch, detached, as scalars on the device.

    sum: [] the sum of the losses. targets: [] how many it is a sum over. counted: whether ``sum`` is a `Loss`'s."""

    sum: Tensor
    targets: Tensor | float
    metrics: dict[str, Tensor | float]
    counted: bool


class LossHead:
    """The loss function of a last stage: calls the user's, and keeps what it returned of each microbatch.

    It returns scalars whose mean over microbatches and replicas is the loss, as a `Stage` expects. losses: number of
    stages that form one, each of an output of its own.
    """

    def __init__(self, loss_fn: LossOfMicrobatch | None, losses: int = 1) -> None:
        self.loss_fn, self.losses = loss_fn, losses
        self.begin(None, keep_outputs=False)

    @property
    def left_out(self) -> str:
        """Name of the head that the loss function multiplies by itself; "" for none."""
        return self.loss_fn.head if isinstance(self.loss_fn, ChunkedLoss) else ""

    def on(self, module: nn.Module, *, at_once: bool) -> LossFunction:
        """The loss function of one last stage. module, at_once: as of `ChunkedLoss.of`."""
        return partial(self, module=module, at_once=at_once) if self.left_out else self

    def begin(self, weight: float | None, *, keep_outputs: bool, scale: float = 1.0) -> None:
        """A step begins.

        weight: factor of every sum; None where counts are not known, or not needed. scale: that of every microbatch.
        """
        self.weight, self.keep_outputs, self.scale = weight, keep_outputs, scale
        self.formed: dict[int, Formed] = {}
        """What the loss function returned, by number of the microbatch times ``losses``, and of the output."""
        self.outputs: dict[int, Any] = {}
        """The model's outputs, detached and without repeated rows, by number of the microbatch."""

    def of_output(self, number: int) -> LossFunction:
        """The loss function of the stage that forms the loss of one output."""
        return partial(self, place=number)

    def __call__(
        self, output: Any, expected: Expected, *, module: nn.Module | None = None, at_once: bool = False, place: int = 0
    ) -> Tensor:
        number, target, rows, padded = expected
        if rows != padded:
            output = first_rows(output, rows, padded)
        if self.keep_outputs:
            kept = output if module is None else self._with_head().logits(module, output)
            self.outputs[number] = pytree.tree_map_only(Tensor, torch.detach, kept)
        if self.loss_fn is None or (target is None and not torch.is_grad_enabled()):
            return torch.zeros(())
        if self.losses > 1:
            assert isinstance(self.loss_fn, OutputLosses)
            loss: Tensor | Loss = self.loss_fn.of_output(place, output, target)
        else:
            loss = self._of(output, target, module, at_once) if rows or not padded else _nothing(output)
        if not isinstance(loss, Loss):
            check_loss(loss)
            _check_connected(loss, output)
            self.formed[number * self.losses + place] = Formed(loss.detach(), 1, {}, False)
            return loss
        _check(loss)
        if self.weight is None and torch.is_grad_enabled():
            raise _uncounted()
        metrics = {name: _detached(value) for name, value in loss.metrics.items()}
        self.formed[number] = Formed(loss.sum.detach(), _detached(loss.count), metrics, True)
        return loss.sum if self.weight is None else loss.sum * self.weight

    def _of(self, output: Any, target: Any, module: nn.Module | None, at_once: bool) -> Tensor | Loss:
        if module is None:
            assert self.loss_fn is not None
            return self.loss_fn(output, target)
        loss_fn = self._with_head()
        if loss_fn.counted and self.weight is None and torch.is_grad_enabled():
            raise _uncounted()
        return loss_fn.of(module, output, target, Weighing(self.scale, self.weight or 1.0), at_once=at_once)

    def _with_head(self) -> ChunkedLoss:
        assert isinstance(self.loss_fn, ChunkedLoss)
        return self.loss_fn

    def take(self) -> tuple[dict[int, Formed], dict[int, Any]]:
        """What was formed, and the outputs, by number of the microbatch; neither is kept any longer."""
        formed, outputs = self.formed, self.outputs
        self.begin(None, keep_outputs=False)
        return formed, outputs


def first_rows(output: Any, rows: int, padded: int) -> Any:
    """The first ``rows`` of every tensor of an output, each [padded, ...].

    Raises `StageError` for a tensor of another first dimension, which does not show its repeated rows.
    """

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != padded:
            raise StageError(
                f"the model's output has a tensor of shape {list(tensor.shape)}, which does not show the {padded} rows"
                " of its padded microbatch",
                "return outputs with the rows first, or drop the last, smaller batch of an epoch",
            )
        return tensor[:rows]

    return pytree.tree_map_only(Tensor, cut, output)


def labels_counted(targets: Any) -> Tensor | None:
    """The number [] of targets that are not -100, where they lie; None where targets do not say it.

    targets: a tensor of any shape, or a mapping with ``labels``, or a container of one tensor.
    """
    labels = labels_of(targets)
    return None if labels is None else (labels != -100).sum()


def count_of_loss(loss_fn: LossOfMicrobatch | None, count_fn: CountOfTargets) -> CountOfTargets:
    """``count_fn``; the ``count`` of a `ChunkedLoss` where ``count_fn`` is the default."""
    return loss_fn.count if isinstance(loss_fn, ChunkedLoss) and count_fn is labels_counted else count_fn


def _uncounted() -> StageError:
    return StageError(
        "loss_fn returned a `Loss`, and its count does not follow from the targets",
        "pass count_fn=, which gives the count of the whole targets before the step: Pipeline(count_fn=...)",
    )


def _nothing(output: Any) -> Loss:
    """The loss of a microbatch that has only repeated rows: 0, and connected to the output, whose rows are cut off."""
    parts = [leaf.sum() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not parts:
        raise StageError("the model's output has no floating tensor", "drop the last, smaller batch of an epoch")
    return Loss(torch.stack(parts).sum(), 0)


def _check_connected(loss: Tensor, output: Any) -> None:
    """Refuse a loss, a scalar, without a gradient where the output has one: nothing would be trained."""
    if loss.requires_grad or not torch.is_grad_enabled():
        return
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output)):
        raise StageError(
            "loss_fn returned a loss that has no gradient, although the model's output has one",
            "compute the loss of the output with torch's functions alone: no detach(), item() or numpy",
        )


def _check(loss: Loss) -> None:
    for name, value in (("sum", loss.sum), ("count", loss.count), *loss.metrics.items()):
        if isinstance(value, Tensor) and value.dim():
            raise StageError(
                f"loss_fn returned a Loss whose `{name}` has the shape {list(value.shape)}", "return scalars"
            )
    if not isinstance(loss.sum, Tensor):
        raise StageError(f"loss_fn returned a Loss whose `sum` is a {type(loss.sum).__name__}", "return a tensor")


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value
