"""Cross entropy of hidden states and a head's weight, a chunk of rows at a time.

    logits = x W^T + b        [chunk, V] in the type of x
    loss   = log sum exp(logits) - logits[target]
    g      = factor * (softmax(logits) - onehot(target)), 0 in rows with an ignored target
    dx = g W      dW = sum over chunks of g^T x      db = sum over chunks of g

Where tensor ranks share the columns of the logits, V counts own ones, and dx is a part of a sum over these ranks.
Losses and sums over chunks are in float32, for float64 in float64. Nothing here asks the device for a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.device.choice import device_for

if TYPE_CHECKING:
    from schedc_runtime.head_loss.columns import LogitColumns

LogitLoss = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(logits [chunk, V], targets [chunk], target that does not count) -> ([] sum of the losses, [chunk, V] its gradient).

All in the wide type. Logits may be overwritten, and so may the gradient by who gets it.
"""


@dataclass(frozen=True)
class Rule:
    """What the loss of a row is.

    chunk: rows whose logits are there at once. ignored: target of the rows that do not count.
    after: what the model does with logits [chunk, V] before it returns them, element by element; None for nothing.
    library: who computes losses and their gradients in place of the operations here.
    columns: the columns of logits that this rank has; None for all.
    """

    chunk: int
    ignored: int = -100
    after: Callable[[Tensor], Tensor] | None = None
    library: LogitLoss | None = None
    columns: LogitColumns | None = None


class Head(NamedTuple):
    """The head's parameters: weight [V, H] and bias [V], which a head may lack."""

    weight: Tensor
    bias: Tensor | None = None

    def like(self, x: Tensor) -> Head:
        """The same in the type of x [N, H], which under autocast is autocast's."""
        return Head(self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Wanted(NamedTuple):
    """Which gradients `gradients` computes."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


class Sums:
    """The gradients of weight [V, H] and bias [V], summed over chunks in a wide type; None for one not wanted."""

    def __init__(self, head: Head, wanted: Wanted, wide: torch.dtype, into: Tensor | None = None) -> None:
        """into: [V, H] contiguous in ``wide``, to which the gradient of the weight is added; by default new zeros."""
        weight, bias = head
        self.weight = self.bias = None
        if wanted.weight:
            self.weight = torch.zeros_like(weight, dtype=wide) if into is None else into
        if wanted.bias and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=wide)

    def add(self, g: Tensor, narrow: Tensor, x: Tensor) -> None:
        """Add a chunk. g: [chunk, V] wide. narrow: the same in the type of x. x: [chunk, H]."""
        if self.bias is not None:
            self.bias += g.sum(0)
        if self.weight is None:
            return
        if x.dtype is not self.weight.dtype and not device_for(x.device).supports("wide sums"):
            torch.ops.aten.addmm.dtype_out(self.weight, narrow.t(), x, self.weight.dtype, out=self.weight)
        else:
            self.weight.addmm_(g.t(), x.to(self.weight.dtype))


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of losses and sums for hidden states of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Wraps compute in the types of the arguments. x: a tensor [...] on the device that computes."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def losses(x: Tensor, head: Head, targets: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """([] the sum of the losses, [N] log-sums of each row's logits). A library gives no log-sums: [0].

    x: [N, H] hidden states. targets: [N] whole numbers.
    """
    log_sums = x.new_empty(0 if rule.library else len(x), dtype=wide_type(x.dtype))
    chosen, total = torch.empty_like(log_sums), log_sums.new_zeros(())
    for part in _parts(len(x), rule.chunk):
        logits = _finished(_logits(x[part], head), rule)
        if rule.library is not None:
            total += rule.library(logits, targets[part], rule.ignored)[0]
            continue
        log_sums[part], chosen[part] = _numbers(logits, targets[part], rule)
    if rule.columns is not None:  # once for all chunks
        log_sums, chosen = rule.columns.together(log_sums, chosen)
    for part in () if rule.library else _parts(len(x), rule.chunk):
        total += _loss(log_sums[part], chosen[part], targets[part], rule)
    return total, log_sums


def gradients(
    x: Tensor,
    head: Head,
    targets: Tensor,
    rule: Rule,
    factor: Tensor | float,
    *,
    wanted: Wanted,
    log_sums: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Sums]:
    """([] the sum of the losses, [N, H] gradient of x, those of the head).

    factor: what the sum of the losses is multiplied by before it is differentiated. into: see `Sums`.
    log_sums: [N] as `losses` gave them; without log-sums the losses are computed, else their sum is of no use.
    """
    wide = wide_type(x.dtype)
    total = x.new_zeros((), dtype=wide)
    sums = Sums(head, wanted, wide, into)
    x_grad = torch.empty_like(x) if wanted.hidden else None
    for part in _parts(len(x), rule.chunk):
        rows, target = x[part], targets[part]
        plain = _logits(rows, head)
        logits = _finished(plain, rule)
        if rule.library is not None:
            loss, g = rule.library(logits, target, rule.ignored)
            total += loss
            g = g.mul_(factor)
        else:
            if log_sums is None:
                row_sums, chosen = _numbers(logits, target, rule)
                if rule.columns is not None:
                    row_sums, chosen = rule.columns.together(row_sums, chosen)
                total += _loss(row_sums, chosen, target, rule)
            else:
                row_sums = log_sums[part]
            g = _logit_gradients(logits, row_sums, target, rule, factor)
        g = _through(plain, g, rule)
        del plain, logits
        narrow = g.to(x.dtype)
        if x_grad is not None:
            torch.mm(narrow, head.weight, out=x_grad[part])
        sums.add(g, narrow, rows)
    return total, x_grad, sums


def _parts(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk))


def _logits(rows: Tensor, head: Head) -> Tensor:
    return functional.linear(rows, head.weight, head.bias)


def _finished(logits: Tensor, rule: Rule) -> Tensor:
    """[chunk, V] the logits that the loss is of, in the wide type."""
    return (logits if rule.after is None else rule.after(logits)).to(wide_type(logits.dtype))


def _places(logits: Tensor, targets: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """[chunk, 1] each: the columns of targets, 0 for ignored ones, and whether logits have them; None for all."""
    counted = torch.where(targets != rule.ignored, targets, 0).unsqueeze(1)
    return (counted, None) if rule.columns is None else rule.columns.own(counted, logits.shape[1])


def _numbers(logits: Tensor, targets: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """[chunk] each: log-sum of a row, and its target's logit; 0 where the own columns do not have it."""
    place, inside = _places(logits, targets, rule)
    chosen = logits.gather(1, place)
    if inside is not None:
        chosen = torch.where(inside, chosen, 0)
    return torch.logsumexp(logits, -1), chosen.squeeze(1)


def _loss(log_sums: Tensor, chosen: Tensor, targets: Tensor, rule: Rule) -> Tensor:
    """[] the sum of the losses of a chunk's rows. log_sums, chosen: [chunk] as of `_numbers`, of all columns."""
    return torch.where(targets != rule.ignored, log_sums - chosen, 0).sum()


def _logit_gradients(logits: Tensor, log_sums: Tensor, targets: Tensor, rule: Rule, factor: Tensor | float) -> Tensor:
    """[chunk, V] the gradient of the logits, in their memory."""
    place, inside = _places(logits, targets, rule)
    minus = torch.full_like(log_sums, -1).unsqueeze(1)
    g = logits.sub_(log_sums.unsqueeze(1)).exp_()
    g.scatter_add_(1, place, minus if inside is None else torch.where(inside, minus, 0))
    return g.mul_(((targets != rule.ignored).to(g.dtype) * factor).unsqueeze(1))


def _through(plain: Tensor, g: Tensor, rule: Rule) -> Tensor:
    """[chunk, V] the gradient of what the product gave, from that of what the model makes of it."""
    if rule.after is None:
        return g
    with torch.enable_grad():
        leaf = plain.detach().requires_grad_()
        result = rule.after(leaf)
    (grad,) = torch.autograd.grad(result, leaf, g.to(result.dtype))
    return grad.to(g.dtype)
