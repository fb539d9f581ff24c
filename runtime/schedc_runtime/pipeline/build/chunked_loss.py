"""What a loss function may return; and `ChunkedLoss`, which multiplies by the head itself, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from schedc.ir.plan import HeadLoss
from schedc_runtime.errors import PlanMismatch, RuntimeFault, StageError
from schedc_runtime.head_loss.chunks import Head, LogitLoss, Rule, losses, wide_type, without_autocast
from schedc_runtime.head_loss.functions import HeadRows, again, early
from schedc_runtime.partition.left_out import HeadInput
from schedc_runtime.providers import TORCH

if TYPE_CHECKING:
    from schedc_runtime.head_loss.columns import LogitColumns
    from schedc_runtime.tensor_parallel.split_model import SplitProducts

FORMS = ("early", "again")
MEANS = ("step", "microbatch")
CHUNK = 1024
"""Rows at a time where nobody says how many."""


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss of one microbatch as a sum over targets, such as tokens. A step takes the mean over all.

    sum: the sum of the losses, a differentiable scalar.
    count: [] the number of targets that it is a sum over.
    metrics: further sums, [] by name, such as the number of right answers. A step divides each by its count.
    """

    sum: Tensor
    count: Tensor | float
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


LossOfMicrobatch = Callable[[Any, Any], "Tensor | Loss"]
"""loss_fn(output of the model, target) for one microbatch: [] its mean loss, or a `Loss`."""


class Weighing(NamedTuple):
    """What the sum of a microbatch's losses is multiplied by before it is differentiated.

    scale: factor of the loss of a microbatch, such as one over their number. weight: factor of a sum over targets.
    """

    scale: float
    weight: float


def labels_of(targets: Any) -> Tensor | None:
    """The labels [...] among targets, such as `Pipeline.step` gets; None where they are not a single tensor."""
    if isinstance(targets, Mapping) and "labels" in targets:
        targets = targets["labels"]
    leaves = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
    return leaves[0] if len(leaves) == 1 else None


@dataclass(frozen=True)
class ChunkedLoss:
    """Cross entropy of a language model whose logits are never there at once: head and loss in one.

        pipe = Pipeline(model, program, loss_fn=ChunkedLoss(head="lm_head", chunk=1024))

    The head's product is left out of the last stage. The loss multiplies hidden states [..., H] by the head's weight
    [V, H], a chunk of rows at a time. Names of parameters and checkpoints stay as they are.

    head: name of the `nn.Linear` that makes the logits. What the model does with them must be done element by element.
    chunk: rows (tokens) whose logits are there at once; by default as the plan says, else 1024.
    form: ``"early"`` computes all gradients in the forward, and nothing of the head is left for I and W. ``"again"``
        keeps a number per row, and makes the logits anew in I and in W. By default as the plan says, else ``"early"``.
    ignore_index: the target of rows that do not count.
    mean: over the counted targets of the ``"step"``, or of each ``"microbatch"``.
    shift: compare each token's logits with the label of the next token, as Hugging Face models do inside.
    library: what ``Pipeline(providers={"loss": ...})`` names; torch's operations by default.
    columns: set by a pipeline whose tensor ranks split the head: each then makes the logits of its own columns.

    Targets are whole numbers [...], one per row of hidden states, or a mapping with ``labels``. Called by itself with
    logits [..., V], or an output that has ``logits``, it gives the same loss of them, whole.
    """

    head: str
    chunk: int | None = None
    form: str | None = None
    ignore_index: int = -100
    mean: str = "step"
    shift: bool = False
    library: LogitLoss | None = field(default=None, repr=False)
    columns: LogitColumns | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.head, str) or not self.head:
            raise RuntimeFault(f"ChunkedLoss(head={self.head!r}) names no layer", "pass its name, as head='lm_head'")
        rows = CHUNK if self.chunk is None else self.chunk
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise RuntimeFault(
                f"ChunkedLoss(chunk={self.chunk!r}) multiplies no rows", "pass a number of rows, as chunk=1024"
            )
        for name, value, values in (("form", self.form or FORMS[0], FORMS), ("mean", self.mean, MEANS)):
            if value not in values:
                allowed = " or ".join(map(repr, values))
                raise RuntimeFault(f"ChunkedLoss({name}={value!r}) is not known", f"pass {name}={allowed}")

    @property
    def counted(self) -> bool:
        """Whether it gives a `Loss`; else means."""
        return self.mean == "step"

    def count(self, targets: Any) -> Tensor | None:
        """The number [] of targets that count, where they lie; None where targets do not say it."""
        labels = labels_of(targets)
        return None if labels is None else (self._shifted_labels(labels) != self.ignore_index).sum()

    def __call__(self, output: Any, targets: Any) -> Tensor | Loss:
        """A `Loss`, or [] the mean over a microbatch, of logits that are there."""
        logits = output if isinstance(output, Tensor) else output["logits"]
        logits = self._shifted(logits.to(wide_type(logits.dtype)))
        labels = self._labels(targets, logits)
        total = functional.cross_entropy(
            logits.flatten(0, -2), labels.to(logits.device), ignore_index=self.ignore_index, reduction="sum"
        )
        return self._result(total, labels)

    def of(self, module: nn.Module, output: Any, targets: Any, weighing: Weighing, *, at_once: bool) -> Tensor | Loss:
        """The loss of a microbatch, a scalar. It may compute gradients only where gradients are on.

        module: the last stage, which holds the head. output: the model's, with a `HeadInput` in place of the logits.
        at_once: whether gradients of the head may be added to those of its parameters at once.
        """
        entering, rows, parameters = self._rows(module, output, targets)
        rule = Rule(self.chunk or CHUNK, self.ignore_index, entering.after, self.library, self.columns)
        if not torch.is_grad_enabled():
            with without_autocast(rows.hidden):
                total, _ = losses(rows.hidden, parameters.like(rows.hidden), rows.targets, rule)
        elif self.form == "again":
            total = again(rows, parameters, rule)
        else:
            total = early(rows, parameters, rule, self._factor(rows, weighing), at_once=at_once)
        return self._result(total, rows.targets)

    def logits(self, module: nn.Module, output: Any) -> Any:
        """The model's output [...], with logits in place of the `HeadInput`, without a graph."""
        layer = module.get_submodule(self.head)

        def product(entering: HeadInput) -> Tensor:
            logits: Tensor = layer(entering.hidden)
            logits = logits if self.columns is None else self.columns.whole(logits)
            return logits if entering.after is None else entering.after(logits)

        with torch.no_grad():
            return pytree.tree_map_only(HeadInput, product, output, is_leaf=_is_input)

    def _rows(self, module: nn.Module, output: Any, targets: Any) -> tuple[HeadInput, HeadRows, Head]:
        """What enters the head, as rows in the type that autocast gives them, and the head's parameters."""
        (entering,) = [leaf for leaf in pytree.tree_leaves(output, is_leaf=_is_input) if _is_input(leaf)]
        hidden, layer = self._shifted(entering.hidden), module.get_submodule(self.head)
        kind = hidden.device.type
        narrows = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if narrows and hidden.dtype is not torch.float64:
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        labels = self._labels(targets, hidden).to(hidden.device)
        return entering, HeadRows(hidden.flatten(0, -2), labels), Head(layer.weight, layer.bias)  # type: ignore[arg-type]

    def _labels(self, targets: Any, rows: Tensor) -> Tensor:
        """[N] the labels of ``rows`` [..., H or V]."""
        labels = labels_of(targets)
        if labels is None or labels.is_floating_point():
            raise StageError(
                "a ChunkedLoss compares with whole numbers, and the targets have none",
                "pass targets of whole numbers, one per token, or a mapping with `labels`",
            )
        labels = self._shifted_labels(labels)
        if labels.shape != rows.shape[:-1]:
            raise StageError(
                f"targets of shape {list(labels.shape)} for hidden states or logits of shape {list(rows.shape)}",
                "pass a target for each row; shift=True compares tokens with the next token's label",
            )
        return labels.flatten()

    def _shifted(self, rows: Tensor) -> Tensor:
        return rows[..., :-1, :] if self.shift else rows

    def _shifted_labels(self, labels: Tensor) -> Tensor:
        return labels[..., 1:] if self.shift else labels

    def _result(self, total: Tensor, labels: Tensor) -> Tensor | Loss:
        """total: [] sum of the losses. labels: [N]."""
        count = (labels != self.ignore_index).sum()
        return Loss(total, count) if self.counted else total / count.clamp(min=1).to(total.device)

    def _factor(self, rows: HeadRows, weighing: Weighing) -> Tensor | float:
        """The factor of the sum of the losses that will be differentiated."""
        if self.counted:
            return weighing.scale * weighing.weight
        count = (rows.targets != self.ignore_index).sum().clamp(min=1)
        return weighing.scale / count.to(wide_type(rows.hidden.dtype))


def carried_loss(
    loss_fn: LossOfMicrobatch | None,
    plan: HeadLoss | None,
    model: nn.Module,
    device: torch.device,
    library: str,
    split: SplitProducts | None,
) -> LossOfMicrobatch | None:
    """The loss function as a pipeline carries it out: by its plan, a library's name, and a head that ranks split."""
    return by_columns(with_library(planned_loss(loss_fn, plan), model, device, library), split)


def planned_loss(loss_fn: LossOfMicrobatch | None, plan: HeadLoss | None) -> LossOfMicrobatch | None:
    """The loss function with what the plan says of it. Raises `PlanMismatch` where they contradict each other."""
    if plan is None or loss_fn is None:
        return loss_fn
    if not isinstance(loss_fn, ChunkedLoss):
        if plan.form == "whole":
            return loss_fn
        raise PlanMismatch(
            f"the plan says `loss {plan.form}`, and loss_fn takes logits",
            "pass loss_fn=ChunkedLoss(head='lm_head'), with the head's name in the model, or write `loss whole`",
        )
    for name, own, said in (("form", loss_fn.form, plan.form), ("chunk", loss_fn.chunk, plan.chunk or None)):
        if own is not None and said is not None and own != said:
            raise PlanMismatch(
                f"the plan says `{said}` of the loss, and loss_fn is a ChunkedLoss({name}={own!r})",
                f"leave {name}= out, which is then the plan's, or change the plan's line `loss`",
            )
    if plan.form == "whole":
        raise PlanMismatch(
            "the plan says `loss whole`, and loss_fn is a ChunkedLoss", "write `loss early` or `loss again` in the plan"
        )
    return replace(loss_fn, form=plan.form, chunk=plan.chunk or loss_fn.chunk)


def with_library(
    loss_fn: LossOfMicrobatch | None, model: nn.Module, device: torch.device, name: str
) -> LossOfMicrobatch | None:
    """The loss function, computed by the provider ``name``. Raises `RuntimeFault` where it cannot serve the model."""
    if name in ("", TORCH) or loss_fn is None:
        return loss_fn
    if not isinstance(loss_fn, ChunkedLoss):
        raise RuntimeFault(
            f"loss {name}: a library computes the loss of a ChunkedLoss alone, and loss_fn is none",
            "pass loss_fn=ChunkedLoss(head='lm_head'), with the head's name in the model, or leave the provider out",
        )
    weight = getattr(dict(model.named_modules()).get(loss_fn.head), "weight", None)
    if not isinstance(weight, Tensor):
        return loss_fn  # the cut names the head that is missing
    from schedc_runtime.loss_providers import LossCase, loss_for

    case = LossCase(device, wide_type(weight.dtype), len(weight))
    return replace(loss_fn, library=loss_for(name, case))


def by_columns(loss_fn: LossOfMicrobatch | None, split: SplitProducts | None) -> LossOfMicrobatch | None:
    """The loss function, of own columns of the logits where tensor ranks split the head that it multiplies by."""
    if split is None or not split.vocabulary.columns:
        return loss_fn
    from schedc_runtime.head_loss.columns import LogitColumns

    assert isinstance(loss_fn, ChunkedLoss)
    if loss_fn.library is not None:
        raise RuntimeFault(
            f"a library computes the loss of whole logits, and tensor ranks split the head `{loss_fn.head}`",
            'leave providers={"loss": ...} out, or keep the head whole: write the style "replicate"',
        )
    return replace(loss_fn, columns=LogitColumns(split.group.expert))


def prints_of_columns(loss_fn: LossOfMicrobatch | None) -> dict[str, str]:
    """What ranks that share the columns of logits must have in common, as chunks are collectives; else empty."""
    shared = isinstance(loss_fn, ChunkedLoss) and loss_fn.columns is not None
    return {"loss in chunks": repr(loss_fn)} if shared else {}


def check_vocab(model: nn.Module, loss_fn: LossOfMicrobatch | None, plan: HeadLoss | None) -> None:
    """Raise `PlanMismatch` where the model's head has another number of words than the plan says."""
    if plan is None or not plan.vocab or not isinstance(loss_fn, ChunkedLoss):
        return
    words = getattr(dict(model.named_modules()).get(loss_fn.head), "out_features", plan.vocab)
    if words != plan.vocab:
        raise PlanMismatch(
            f"the plan says a vocab of {plan.vocab}, and the head `{loss_fn.head}` has {words} words",
            f"write `vocab {words}` in the plan's line `loss`",
        )


def _is_input(value: Any) -> bool:
    return isinstance(value, HeadInput)
