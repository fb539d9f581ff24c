"""The experts of one rank: stacked gated MLPs over rows sorted by expert, with deferrable weight gradients.

    rows        [R, width]       rows of expert 0, then of expert 1, ...; ``counts[e]`` of them for expert e
    gate_up     [E, width, 2F]   the gate's columns first
    down        [E, F, width]
    result      [R, width]       down(silu(gate) * up) of each row, in the order of the rows

Dropless rows go through a loop of products, one per expert. Padded rows, as many for every expert, go through one
batched product. Both compute the weight gradient of a stack at once, and by the same function in B and in W (see
`stage.recipes`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc.attachments.values import Level
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.recompute.regions import region_of_rows
from schedc_runtime.stage.recipes import RECIPES, Gradients, Recipe, Saved, Slots, refuse_twice, waits


class Experts(nn.Module):
    """``count`` gated MLPs of ``width`` and inner size ``inner``, stacked.

    first: id of the first expert here. total: number of experts of the layer, of which these are consecutive ones.
    Both change when the experts are sharded over ranks, see `shard_experts`; parameters are then marked
    ``expert_parallel``.
    """

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.total = 0, count
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew: normal, with a deviation of 1 over the root of the inputs."""
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def keep(self, first: int, count: int) -> None:
        """Keep the ``count`` experts from ``first`` on, in new parameters, and mark these."""
        self.first = first
        for name, whole in list(self.named_parameters()):
            part = whole.detach().narrow(0, first, count).clone(memory_format=torch.preserve_format)
            setattr(self, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        self._mark()

    @property
    def sharded(self) -> bool:
        """Whether other ranks hold some of the experts."""
        return len(self.gate_up) < self.total

    def _mark(self) -> None:
        for parameter in self.parameters():
            parameter.expert_parallel = self.sharded  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        duplicate._mark()  # a copied parameter loses the mark
        return duplicate

    def forward(self, rows: Tensor, counts: Sequence[int] | None, *slots: Tensor) -> Tensor:
        """[R, width] rows to the same shape. counts: [E] rows of each expert; None: R / E rows each.

        slots: ``gate_up`` and ``down`` of borrowed experts, whose counts and rows follow those of the own experts.
        Autograd computes their gradients.
        """
        return region_of_rows(Level.FULL, self.compute, rows, counts, *slots)  # type: ignore[no-any-return]

    def compute(self, rows: Tensor, counts: Sequence[int] | None, *slots: Tensor) -> Tensor:
        """[R, width] to the same, as `forward`."""
        if slots and counts is not None:
            own, lent = len(self.gate_up), len(slots[0])
            counts, borrowed = counts[:own], counts[own : own + lent]
            if lent:
                mine, others = rows.split_with_sizes((sum(counts), sum(borrowed)))
                gate_up, down = slots
                return torch.cat((self._own(mine, counts), _mlp(others, gate_up, down, borrowed)))
        return self._own(rows, counts)

    def _own(self, rows: Tensor, counts: Sequence[int] | None) -> Tensor:
        self._check(rows, counts)
        return _mlp(rows, self.gate_up, self.down, counts)

    def _check(self, rows: Tensor, counts: Sequence[int] | None) -> None:
        experts = len(self.gate_up)
        if counts is None and len(rows) % experts:
            raise RuntimeFault(f"{len(rows)} padded rows for {experts} experts", "give every expert as many rows")
        if counts is not None and (len(counts) != experts or sum(counts) != len(rows)):
            raise RuntimeFault(f"{len(rows)} rows for {experts} experts that are said to have {list(counts)}")


def _mlp(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int] | None) -> Tensor:
    if torch.is_autocast_enabled(rows.device.type):
        narrow = torch.get_autocast_dtype(rows.device.type)
        rows, gate_up, down = rows.to(narrow), gate_up.to(narrow), down.to(narrow)
    gate, up = region_of_rows(Level.MEDIUM, stacked_linear, rows, gate_up, counts).chunk(2, dim=-1)
    return stacked_linear(region_of_rows(Level.ACT, gated, gate, up), down, counts)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """[...] silu(gate) * up. The backward holds only ``gate`` and ``up``."""
    output: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


class _Gated(torch.autograd.Function):
    """The same operations as autograd, hence the same bits, without holding silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * functional.silu(gate)


def stacked_linear(rows: Tensor, weight: Tensor, counts: Sequence[int] | None) -> Tensor:
    """[R, in] rows times [E, in, out] weights to [R, out]. counts: [E] rows by each weight; None: R / E rows each."""
    output: Tensor = _StackedLinear.apply(  # type: ignore[no-untyped-call]
        rows, weight, None if counts is None else tuple(counts)
    )
    return output


class _StackedLinear(torch.autograd.Function):
    """One function for all experts. A loop under autograd would make a gradient of the whole stack for each expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...] | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _products(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_twice(ctx)
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        rows_grad = _products(grad, weight.transpose(1, 2), ctx.counts) if needs_rows else None
        weight_grad = _weight_grad(rows, grad, weight, ctx.counts) if needs_weight and not waits(ctx) else None
        return rows_grad, weight_grad, None


def _weight_product(slots: Slots, grad: Tensor, saved: Saved, counts: tuple[int, ...] | None) -> Gradients:
    return (_weight_grad(saved[0], grad, saved[1], counts),)


RECIPES["_StackedLinearBackward"] = Recipe({1: (0, 1)}, _weight_product, lambda node, slots: node.counts)


def _products(rows: Tensor, weight: Tensor, counts: tuple[int, ...] | None) -> Tensor:
    """[R, out] The rows of each expert e times ``weight[e]``: one product each, or one batched product."""
    experts, _, out = weight.shape
    if counts is None:
        return rows.reshape(experts, -1, rows.shape[-1]).bmm(weight).view(-1, out)
    result = rows.new_empty(len(rows), out)
    for part, target, each in zip(
        rows.split_with_sizes(counts), result.split_with_sizes(counts), weight.unbind(), strict=True
    ):
        if len(part):
            torch.mm(part, each, out=target)
    return result


def _weight_grad(rows: Tensor, grad: Tensor, weight: Tensor, counts: tuple[int, ...] | None) -> Tensor:
    """[E, in, out] For each expert the transposed rows times the gradient of their products; zero without rows."""
    if counts is None:
        experts = len(weight)
        return rows.reshape(experts, -1, rows.shape[-1]).transpose(1, 2).bmm(grad.reshape(experts, -1, grad.shape[-1]))
    result = torch.empty_like(weight)  # with the weight's strides: the optimizer then needs no copy
    for part, part_grad, target in zip(
        rows.split_with_sizes(counts), grad.split_with_sizes(counts), result.unbind(), strict=True
    ):
        if len(part):
            torch.mm(part.t(), part_grad, out=target)
        else:
            target.zero_()
    return result
