"""Divides the rows of microbatches among homes and copies of a step: `schedc.step.costs.step_copies` over torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from schedc.step.costs import step_copies
from schedc.step.costs.step_copies import Held as Held
from schedc.step.costs.step_copies import plan_step as plan_step
from schedc.step.costs.step_copies import plan_step_among as plan_step_among
from schedc_runtime.device.choice import brought
from schedc_runtime.moe.forest import TORCH, Forest


@dataclass(frozen=True)
class StepQuotas:
    """The quotas of a step's copies on the device. quotas: those of `step_copies.quotas_of` as tensors."""

    quotas: step_copies.QuotaTables

    @staticmethod
    def of(held: Held, local: int, where: torch.device, peers: int | None = None) -> StepQuotas:
        """The quotas for the copies ``held``. The device gets all numbers in a single copy.

        local: experts of a rank. peers: the neighbours among which rows move; None for all ranks.
        """
        parent, below, borrowed, peers = step_copies.quotas_of(held, local, peers)
        numbers = brought([*parent, *(number for row in (*below, *borrowed) for number in row)], where)
        ranks, slots = len(held), len(borrowed[0])
        first, second, third = torch.split(numbers, [ranks, ranks * ranks, ranks * slots])
        tables = second.view(ranks, ranks), third.view(ranks, slots)
        return StepQuotas(step_copies.QuotaTables(first, *tables, peers))

    @property
    def parent(self) -> Tensor:
        """[R] the rank whose rows each takes; itself for a rank that takes none."""
        parent: Tensor = self.quotas.parent
        return parent

    @property
    def below(self) -> Tensor:
        """[R, R] 1 where a rank is another, or below it; 0 for roots."""
        below: Tensor = self.quotas.below
        return below

    def divide(self, rows: Tensor) -> tuple[Forest, Tensor]:
        """`step_copies.divided` of the rows of a microbatch [R, m] int64 by home and expert."""
        return step_copies.divided(TORCH, rows, self.quotas)
