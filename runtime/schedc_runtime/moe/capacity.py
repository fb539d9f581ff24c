"""Drops choices of experts beyond a capacity: the number of tokens that an expert takes from one rank.

A dropped choice keeps its expert as a negative number (`marked_choices`) and has weight 0. No exchange moves it. The
auxiliary loss still counts it. Every rank drops choices of its own tokens, and sends their number with the counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schedc.ir.plan import Capacity, Drop
from schedc.step.costs.exchange import Routing, capacity_rows
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.library import operation
from schedc_runtime.moe.counts import ABSENT


@dataclass(frozen=True)
class ExpertCapacity(Capacity):
    """The capacity of a plan, checked, for every expert and source rank.

    factor: room for this many times the mean number of tokens per expert. drop: which of an expert's tokens stay where
    there are too many. ``position``: the first of the microbatch; ``probs``: those with the largest weight, of equal
    weights the first.
    """

    def __post_init__(self) -> None:
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise RuntimeFault(
                f"capacity {self.factor}", "a positive factor: 1 is the mean number of tokens per expert"
            )
        if self.drop not in _ORDERS:
            raise RuntimeFault(f"drop `{self.drop}`", f"possible: {', '.join(_ORDERS)}")

    def slots(self, tokens: int, top: int, experts: int) -> int:
        """Rows of each expert from one rank, at most its ``tokens``: see `capacity_rows`."""
        return capacity_rows(tokens, Routing(experts, top), self.factor)


def check_bound(bound: float | None, capacity: ExpertCapacity | None = None) -> None:
    """Raise `RuntimeFault` unless ``bound`` is such as `MoELayer.attach` takes."""
    if bound is not None and not 1 <= bound < math.inf:
        raise RuntimeFault(f"a bound of {bound}", "from 1 on: 1 is the mean number of rows, 1.25 a quarter more")
    if bound is not None and capacity is not None:
        raise RuntimeFault("a capacity and a bound: a capacity drops choices, a bound keeps all", "give one of them")


def _by_weight(weight: Tensor) -> Tensor:
    return weight.argsort(descending=True, stable=True)


def _by_position(weight: Tensor) -> Tensor:
    return torch.arange(len(weight), device=weight.device)


_ORDERS: dict[Drop, Callable[[Tensor], Tensor]] = {Drop.PROBS: _by_weight, Drop.POSITION: _by_position}
"""Functions from the weights of choices [choices], in the order of tokens, to the order in which experts take them."""


def kept_choices(index: Tensor, weight: Tensor, slots: int, drop: Drop) -> Tensor:
    """[N, k] bool: the choices of ``index`` [N, k] that stay if each expert takes ``slots`` of these tokens."""
    experts = index.flatten()
    order = _ORDERS[drop](weight.detach().flatten())
    order = order[experts[order].argsort(stable=True)]  # by expert, and inside of one by the policy
    grouped = experts[order]
    rank_in_expert = torch.arange(len(order), device=order.device) - torch.searchsorted(grouped, grouped)
    result = torch.empty_like(order, dtype=torch.bool)
    result[order] = rank_in_expert < slots
    return result.view(index.shape)


def _dropped(index: Tensor, weight: Tensor, slots: int, drop: str) -> tuple[Tensor, Tensor, Tensor]:
    stay = kept_choices(index, weight, slots, Drop(drop))
    return torch.where(stay, index, marked_choices(index)), weight * stay, stay


_drop = operation(
    "drop(Tensor index, Tensor weight, int slots, str drop) -> (Tensor, Tensor, Tensor)", _dropped, "loads:launch_drop"
)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, slots: int, drop: Drop) -> tuple[Tensor, Tensor]:
        marked, kept, stay = _drop(index, weight, slots, Drop(drop).value)
        ctx.save_for_backward(stay)
        ctx.mark_non_differentiable(marked)
        ctx.set_materialize_grads(False)
        return marked, kept

    @staticmethod
    def backward(ctx: Any, _: None, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        (stay,) = ctx.saved_tensors
        return None if gradient is None else gradient * stay, None, None, None


class Dropper(nn.Module):
    """(index, weight), both [N, k], with choices beyond the capacity marked. Unchanged without a capacity."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.capacity: ExpertCapacity | None = None

    def forward(self, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.capacity is None:
            return index, weight
        tokens, k = index.shape
        slots = self.capacity.slots(tokens, k, self.experts)
        dropped: tuple[Tensor, Tensor] = _Drop.apply(weight, index, slots, self.capacity.drop)  # type: ignore[no-untyped-call]
        return dropped


def marked_choices(index: Tensor) -> Tensor:
    """[...] expert numbers from 0 up to the marks of dropped choices, from `ABSENT` - 1 down; and back."""
    return ABSENT - 1 - index
