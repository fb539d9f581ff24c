"""When experts are worked out again: only while many more rows come to a rank than to the mean."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from schedc.plan.values import By

RELAX = 0.9
"""A layer stops recomputing once its step's fullest rank has less than this part of the threshold."""


def imbalance(everyone: Tensor, experts: int, rank: int | None = None) -> float:
    """Rows of the fullest rank, or of ``rank``, over the mean; 1 where there are none.

    everyone: [ranks, N, k] the routing; negative entries are no rows. Equal on all ranks for equal routing.
    """
    ranks = everyone.shape[0]
    chosen = everyone.detach().flatten().long()
    rows = torch.bincount(chosen[chosen >= 0] // (experts // ranks), minlength=ranks).tolist()
    total = sum(rows)
    most = max(rows) if rank is None else rows[rank]
    return most * ranks / total if total else 1.0


@dataclass
class _Layer:
    """on: recompute, whatever a microbatch has. peak: the largest imbalance of this step; None before any."""

    on: bool = True
    peak: float | None = None


@dataclass
class Adaptive:
    """The decisions of one stage: per step and layer, by the step before, the first one as if it were the worst.

    A microbatch above the threshold is recomputed in any case, so that what is kept never has more than ``threshold``
    times the mean rows. It goes off below `RELAX` times the threshold, on above it. recomputed, held: microbatches so
    far, of all layers.
    """

    threshold: float
    by: By
    layers: dict[int, _Layer] = field(default_factory=dict)
    recomputed: int = 0
    held: int = 0

    def decide(self, layer: int, everyone: Tensor, experts: int, rank: int) -> bool:
        """Whether the experts of this microbatch are worked out again."""
        state = self.layers.setdefault(layer, _Layer())
        found = imbalance(everyone, experts, None if self.by is By.GROUP else rank)
        state.peak = found if state.peak is None else max(state.peak, found)
        again = state.on or found > self.threshold
        self.recomputed += again
        self.held += not again
        return again

    def end_step(self) -> None:
        """Decide on the next step from what came in this one."""
        for state in self.layers.values():
            if state.peak is not None:
                state.on = state.peak > self.threshold * (RELAX if state.on else 1.0)
                state.peak = None
