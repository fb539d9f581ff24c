"""Rows times the matrices of their experts as nodes of autograd, whose weight gradients can wait for W.

    stacked_linear     Y = X W                 held: X
    weighted_linear    Y = g * (X W)           held: X and g [R], a gate per row

A gate's gradient is <dY, X W>, which is <dY W^T, X>. The backward computes dY W^T for the rows anyway. So no product
X W is held for the gates. A layer of DeepSeek-V3 holds a quarter less.

One node serves all experts. A loop under autograd would make a gradient of the whole stack for each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.kernels.library import operation
from schedc_runtime.moe.products import PROVIDERS, Case, Provider, RowGroups
from schedc_runtime.stage.recipes import RECIPES, Gradients, Recipe, Saved, Slots, refuse_twice, waits

Leave = Callable[[Callable[[], Tensor]], None]
"""Takes a function that gives the gradients of a stack [E, ...]. The stack itself then gets no gradient."""


def stacked_linear(
    rows: Tensor, weight: Tensor, groups: RowGroups, provider: Provider, leave: Leave | None = None
) -> Tensor:
    """[R, in] rows times [E, in, out] weights to [R, out]."""
    output: Tensor = _StackedLinear.apply(rows, weight, groups, provider, leave)  # type: ignore[no-untyped-call]
    return output


def weighted_linear(
    rows: Tensor, weight: Tensor, gates: Tensor, groups: RowGroups, provider: Provider, leave: Leave | None = None
) -> Tensor:
    """[R, in] rows times [E, in, out] weights, times [R] gates, to [R, out] in the rows' dtype."""
    output: Tensor = _WeightedLinear.apply(rows, weight, gates, groups, provider, leave)  # type: ignore[no-untyped-call]
    return output


class _StackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, *how: Any) -> Tensor:
        ctx.save_for_backward(rows, weight)
        groups, provider, leave = how
        ctx.groups, ctx.provider, ctx.wide, ctx.leave = groups, provider, _wide(weight, leave), leave
        return _product(rows, weight, weight, groups, provider)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice(ctx)
        rows, weight = ctx.saved_tensors
        facts = ctx.groups, ctx.provider, ctx.wide
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        rows_grad = _product(grad, weight.transpose(1, 2), weight, *facts[:2]) if needs_rows else None
        weight_grad = None
        if needs_weight and ctx.leave is not None:
            ctx.leave(partial(_weight_grad, rows.detach(), grad, weight, facts))
        elif needs_weight and not waits(ctx):
            weight_grad = _weight_grad(rows, grad, weight, facts)
        return rows_grad, weight_grad, None, None, None


class _WeightedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, gates: Tensor, *how: Any) -> Tensor:
        ctx.save_for_backward(rows, weight, gates)
        groups, provider, leave = how
        ctx.groups, ctx.provider, ctx.wide, ctx.leave = groups, provider, _wide(weight, leave), leave
        return _cleared(_weighted(_product(rows, weight, weight, groups, provider), gates), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice(ctx)
        rows, weight, gates = ctx.saved_tensors
        facts = ctx.groups, ctx.provider, ctx.wide
        needs_rows, needs_weight, needs_gates, *_ = ctx.needs_input_grad
        rows_grad = gates_grad = weight_grad = None
        weighted: list[Tensor] = []
        now = needs_weight and ctx.leave is None and not waits(ctx)
        if needs_rows or needs_gates:
            unweighted = _product(grad, weight.transpose(1, 2), weight, *facts[:2])
            rows_grad, gates_grad, *weighted = _weighted_backward(unweighted, rows, gates, now)
            rows_grad, gates_grad = _cleared(rows_grad, ctx.groups), _cleared(gates_grad, ctx.groups)
        if now:
            (left,) = weighted or (_weighted(rows, gates),)
            weight_grad = _weight_grad(left, grad, weight, facts)
        elif needs_weight and ctx.leave is not None:
            ctx.leave(partial(_weighted_weight_grad, rows.detach(), gates.detach(), grad, weight, facts))
        return rows_grad, weight_grad, gates_grad, None, None, None


def _backward_of_weighted(unweighted: Tensor, rows: Tensor, gates: Tensor, weighted: bool) -> list[Tensor]:
    gradients = [_weighted(unweighted, gates), _row_products(unweighted, rows, gates.dtype)]
    return [*gradients, _weighted(rows, gates)] if weighted else gradients


_weighted_backward = operation(
    "weighted_backward(Tensor unweighted, Tensor rows, Tensor gates, bool weighted) -> Tensor[]",
    _backward_of_weighted,
    "gates:launch_weighted_backward",
)
"""The gradients of rows [R, columns] and gates [R] from those of weighted rows [R, columns], and these if asked for."""


def _weighted(rows: Tensor, gates: Tensor) -> Tensor:
    """[R, columns] rows times [R] gates, in the rows' dtype."""
    return (rows * gates.unsqueeze(-1)).to(rows.dtype)


def _row_products(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """[R] in ``dtype``: the products of two tensors [R, columns], summed by row, in no narrower type than ``dtype``."""
    wide = torch.promote_types(first.dtype, dtype)
    return (first.to(wide) * second).sum(-1).to(dtype)


def _product(left: Tensor, right: Tensor, weight: Tensor, groups: RowGroups, provider: Provider) -> Tensor:
    """[R, in] x [E, in, out] to [R, out]."""
    return _cleared(provider.multiply(left, right, groups, weight), groups)


def _cleared(result: Tensor, groups: RowGroups) -> Tensor:
    """[R, ...] the same. Where torch looks for NaN, rows that belong to nobody become zero."""
    if groups.ends is not None and groups.counts is None and torch.is_anomaly_enabled():
        numbers = torch.arange(len(result), device=result.device)
        nobody = numbers >= groups.ends[-1]
        result.masked_fill_(nobody.unsqueeze(-1) if result.dim() > 1 else nobody, 0)
    return result


_Facts = tuple[RowGroups, Provider, torch.dtype | None]


def sum_type(tensor: Tensor) -> torch.dtype:
    """The type in which gradients of copies of ``tensor`` [...] are summed: its own, float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _wide(weight: Tensor, leave: Leave | None) -> torch.dtype | None:
    """The type of a weight's gradients where it is not its own: gradients of copied experts have a wider one."""
    kind = sum_type(weight) if leave is not None else weight.grad_dtype if weight.is_leaf else None
    return None if kind is weight.dtype else kind


def _weight_grad(rows: Tensor, grad: Tensor, weight: Tensor, facts: _Facts) -> Tensor:
    """[E, in, out] For each expert the transposed rows times the gradients of their products; zero without rows."""
    groups, provider, wide = facts
    if wide is not None:
        return _in_wider(rows.to(wide), grad.to(wide), groups, weight)
    return provider.multiply(rows, grad, groups, weight)


def _weighted_weight_grad(rows: Tensor, gates: Tensor, grad: Tensor, weight: Tensor, facts: _Facts) -> Tensor:
    """[E, in, out] `_weight_grad` of rows whose products are weighted by gates [R]."""
    return _weight_grad(_weighted(rows, gates), grad, weight, facts)


def _in_wider(rows: Tensor, grad: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    """[E, in, out] The products of slots in a wider type than theirs.

    Slots are few: a loop serves where the host knows their rows, and else who asks it for nothing.
    """
    case = Case(rows.device, rows.dtype, (rows.shape[1], grad.shape[1]), groups.padded, groups.counts is not None)
    able = next(
        (name for name in ("grouped", "triton") if not case.counted and PROVIDERS[name].available(case)), "loop"
    )
    return PROVIDERS[able].multiply(rows, grad, groups, weight)


def _stacked_gradient(slots: Slots, grad: Tensor, saved: Saved, facts: _Facts) -> Gradients:
    return (_weight_grad(saved[0], grad, saved[1], facts),)


def _weighted_gradient(slots: Slots, grad: Tensor, saved: Saved, facts: _Facts) -> Gradients:
    return (_weighted_weight_grad(saved[0], saved[2], grad, saved[1], facts),)


def _facts(node: Any, slots: Slots) -> _Facts:
    return node.groups, node.provider, node.wide


RECIPES["_StackedLinearBackward"] = Recipe({1: (0, 1)}, _stacked_gradient, _facts)
RECIPES["_WeightedLinearBackward"] = Recipe({1: (0, 1, 2)}, _weighted_gradient, _facts)
