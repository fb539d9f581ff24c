"""Plans in closed form who computes which rows of experts, on the device: `schedc.step.costs.forest` over torch."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional

from schedc.step.costs import forest
from schedc.step.costs.forest import Forest as Forest


class _TorchOperations:
    """`forest.Operations` on tensors. None of them waits for the device."""

    def positive(self, values: Tensor) -> Tensor:
        return values.clamp(min=0)

    def descending(self, values: Tensor) -> tuple[Tensor, Tensor]:
        ordered, order = values.sort(dim=-1, descending=True, stable=True)
        return ordered, order

    def ascending(self, values: Tensor) -> Tensor:
        return values.argsort(dim=-1, stable=True)

    def take(self, values: Tensor, index: Tensor, axis: int = -1) -> Tensor:
        return values.gather(axis, index)

    def put(self, like: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return torch.zeros_like(like).scatter_(-1, index, values)

    def add(self, into: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return into.scatter_add_(-1, index, values)

    def find(self, line: Tensor, values: Tensor, right: bool = False) -> Tensor:
        return torch.searchsorted(line, values, right=right).clamp_(max=line.shape[-1] - 1)

    def shifted(self, values: Tensor) -> Tensor:
        return functional.pad(values[..., :-1], (1, 0))

    def rolled(self, values: Tensor) -> Tensor:
        return values.roll(-1, -1)

    def spread(self, values: Tensor, like: Tensor) -> Tensor:
        return values.expand_as(like)

    def numbers(self, count: int, like: Tensor) -> Tensor:
        return torch.arange(count, device=like.device)

    def where(self, condition: Tensor, values: Tensor, others: Tensor) -> Tensor:
        return torch.where(condition, values, others)

    def minimum(self, values: Tensor, others: Tensor) -> Tensor:
        return torch.minimum(values, others)

    def maximum(self, values: Tensor, others: Tensor) -> Tensor:
        return torch.maximum(values, others)

    def least(self, values: Tensor) -> Tensor:
        return values.cummin(-1).values


TORCH = _TorchOperations()
"""`forest.Operations` on tensors, on their device."""


def limits(load: Tensor, within: Fraction, peers: int | None = None) -> Tensor:
    """[..., R] `forest.most_rows` of the rows ``load`` [..., R] int64 by home.

    peers: number of neighbours among which rows move; None: all ranks.
    """
    inside = load if peers is None else load.view(*load.shape[:-1], -1, peers)
    most: Tensor = forest.most_rows(TORCH, inside, within)
    return most.reshape(load.shape)


def plan_forest(rows: Tensor, within: Fraction) -> Forest:
    """`forest.closed_form` of ``rows`` [..., R, m] int64 by home and expert of the home."""
    return forest.closed_form(TORCH, rows, within)


def plan_among(rows: Tensor, within: Fraction, peers: int, slots: int | None = None) -> tuple[Forest, Tensor | None]:
    """`forest.planned` of all ranks where rows move among ``peers`` neighbours. rows: [R, m] as of `plan_forest`."""
    plan, left = forest.planned(TORCH, rows.view(-1, peers, rows.shape[1]), within, slots)
    first = torch.arange(0, len(rows), peers, device=rows.device).unsqueeze(1)
    everyone = Forest((plan.parent + first).flatten(), plan.taken.flatten(), plan.quota.flatten(0, 1))
    return everyone, None if left is None else left.flatten()


def computed_rows(rows: Tensor, plan: Forest) -> Tensor:
    """[..., R, R, m] `forest.rows_on_ranks` of ``rows`` [..., R, m]."""
    computed: Tensor = forest.rows_on_ranks(TORCH, rows, plan)
    return computed
