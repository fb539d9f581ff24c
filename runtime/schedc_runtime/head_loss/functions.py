"""The head with its loss as one node of autograd: gradients in the forward (`early`), or logits again (`again`).

    early   forward: losses, dx, dW        backward: dx        W: nothing
    again   forward: losses, log-sums      backward: dx        W: dW, from logits that are made again

`early` adds dW to the parameter's gradient at once. A forward may therefore run once only, in the order in which
gradients are summed. It must know the factor of the loss, and the gradient that arrives in the backward must be that
factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.head_loss.chunks import Head, Rule, Wanted, gradients, losses, wide_type, without_autocast
from schedc_runtime.stage.additions import Additions, leaf_of
from schedc_runtime.stage.hooks import has_hooks
from schedc_runtime.stage.recipes import RECIPES, Gradients, Recipe, Saved, Slots, refuse_twice, waits


class HeadRows(NamedTuple):
    """The rows of a microbatch. hidden: [N, H] in the type that the head computes in. targets: [N]."""

    hidden: Tensor
    targets: Tensor


def again(rows: HeadRows, head: Head, rule: Rule) -> Tensor:
    """[] the sum of the losses. The backward makes the logits again, and so does W where it comes apart.

    head: weight [V, H] and bias [V].
    """
    total: Tensor = _Again.apply(rows.hidden, *head, rows.targets, rule)  # type: ignore[no-untyped-call]
    return total


def early(rows: HeadRows, head: Head, rule: Rule, factor: Tensor | float, *, at_once: bool) -> Tensor:
    """The sum of the losses, a scalar, with all gradients computed. factor: the loss's later factor.

    at_once: add the gradients of the head to those of its parameters now; else the backward does it.
    """
    given: Head | tuple[None, None] = (None, None) if at_once else head
    total: Tensor = _Early.apply(rows.hidden, *given, rows.targets, head, rule, factor)  # type: ignore[no-untyped-call]
    return total


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rule: Rule) -> Tensor:
        with without_autocast(x):
            total, log_sums = losses(x, Head(weight, bias).like(x), targets, rule)
        ctx.save_for_backward(x, weight, targets, log_sums, *(() if bias is None else (bias,)))
        ctx.rule = rule
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice(ctx)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        later = waits(ctx)
        wanted = Wanted(needs_x, needs_weight and not later, needs_bias and not later)
        return (*_gradients(dict(enumerate(ctx.saved_tensors)), ctx.rule, grad, wanted), None, None)


def _gradients(saved: Saved, rule: Rule, grad: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, in their types, from what `_Again` has saved."""
    x, weight, targets, log_sums = (saved[number] for number in range(4))
    head = Head(weight, saved.get(4))
    with without_autocast(x):
        _, x_grad, sums = gradients(x, head.like(x), targets, rule, grad, wanted=wanted, log_sums=log_sums)
    narrowed = (
        sum if sum is None or part is None else sum.to(part.dtype)
        for sum, part in zip((sums.weight, sums.bias), head, strict=True)
    )  # fmt: skip
    return x_grad, *narrowed


class _Early(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        rule: Rule,
        factor: Tensor | float,
    ) -> Tensor:
        needs_x, *_ = ctx.needs_input_grad
        wanted = Wanted(needs_x, head.weight.requires_grad, head.bias is not None and head.bias.requires_grad)
        into = _running_sum(head.weight, x.dtype) if weight is None and wanted.weight else None
        with without_autocast(x):
            total, x_grad, sums = gradients(x, head.like(x), targets, rule, factor, wanted=wanted, into=into)
        own = [
            (parameter, sum.to(parameter.dtype))
            for parameter, sum in zip(head, (sums.weight, sums.bias), strict=True)
            if parameter is not None and sum is not None and sum is not into
        ]
        by_parameter = {id(parameter): grad for parameter, grad in own} if weight is not None else {}
        if weight is None:
            _add(own)
        ctx.save_for_backward(x_grad, by_parameter.get(id(weight)), by_parameter.get(id(bias)))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice(ctx)
        return (*ctx.saved_tensors, None, None, None, None)


def _running_sum(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The weight's gradient so far [V, H], if chunks can be added to it as they come; else None."""
    total = weight.grad
    plain = type(total) is Tensor and total.dtype is wide_type(dtype) and total.is_contiguous()
    return total if plain and not _is_watched(weight) else None


def _add(own: list[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to the parameters' own, and run hooks. Empties the list."""
    sums = Additions()
    while own:
        parameter, grad = own.pop()
        if parameter.grad is None and not _is_watched(parameter):
            parameter.grad = grad  # the engine would copy it
        else:
            sums.add(leaf_of(_leaf_node(parameter)), grad)
    sums.finish()


def _is_watched(parameter: Tensor) -> bool:
    """Whether a hook waits for the parameter's gradient."""
    leaf = leaf_of(_leaf_node(parameter))
    return has_hooks(parameter) or bool(leaf.before or leaf.behind)


def _leaf_node(parameter: Tensor) -> Any:
    """The node of autograd's graph that adds to the parameter's gradient."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def _later(slots: Slots, grad: Tensor, saved: Saved, rule: Rule) -> Gradients:
    """[slots] the gradients of weight and bias, from logits that are made anew."""
    by_slot = _gradients(saved, rule, grad, Wanted(False, 1 in slots, 2 in slots))
    return tuple(by_slot[slot] for slot in slots)


def _recipe(node: Any) -> Recipe:
    bias = node.next_functions[2][0] is not None
    names = tuple(range(len(node._raw_saved_tensors)))
    saved: Mapping[int, tuple[int, ...]] = {1: names, 2: names} if bias else {1: names}
    return Recipe(saved, _later, lambda node, slots: node.rule, with_weight=(2,) if bias else (), joint=True)


RECIPES["_AgainBackward"] = _recipe
