"""Which choices of experts are dropped where an expert takes no more than so many tokens of a rank.

A dropped choice keeps its expert in its number, which becomes negative (`marked`), and has weight 0: it is moved by
nobody, but still counted by the auxiliary loss. Every rank drops among its own tokens, so that all ranks know from
everyone's routing what was kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schedc.cost.exchange import Routing, capacity_rows
from schedc.plan.values import Capacity, Drop
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.exchange import ABSENT


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


def _by_weight(weight: Tensor) -> Tensor:
    return weight.argsort(descending=True, stable=True)


def _by_position(weight: Tensor) -> Tensor:
    return torch.arange(len(weight), device=weight.device)


_ORDERS: dict[Drop, Callable[[Tensor], Tensor]] = {Drop.PROBS: _by_weight, Drop.POSITION: _by_position}
"""Flat choices, in the order of their tokens, to the order in which an expert takes them in."""


def kept(index: Tensor, weight: Tensor, slots: int, drop: Drop) -> Tensor:
    """[N, k] bool: the choices of ``index`` [N, k] that stay when each expert takes ``slots`` of these tokens."""
    experts = index.flatten()
    order = _ORDERS[drop](weight.detach().flatten())
    order = order[experts[order].argsort(stable=True)]  # by expert, and within one as the policy has it
    grouped = experts[order]
    place = torch.arange(len(order), device=order.device) - torch.searchsorted(grouped, grouped)
    result = torch.empty_like(order, dtype=torch.bool)
    result[order] = place < slots
    return result.view(index.shape)


class Dropper(nn.Module):
    """(index, weight), both [N, k], the choices beyond the capacity marked; as they are without one."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.capacity: ExpertCapacity | None = None

    def forward(self, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.capacity is None:
            return index, weight
        tokens, k = index.shape
        slots = self.capacity.slots(tokens, k, self.experts)
        stay = kept(index, weight, slots, self.capacity.drop)
        return torch.where(stay, index, marked(index)), weight * stay


def marked(index: Tensor) -> Tensor:
    """Expert numbers from 0 up as those of dropped choices, from `ABSENT` - 1 down; and back."""
    return ABSENT - 1 - index
