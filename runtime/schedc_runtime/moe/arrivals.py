"""Counts the rows that a routing brings to each rank, for the decision whether to recompute."""

from __future__ import annotations

import torch
from torch import Tensor

from schedc_runtime.moe.exchange import ABSENT
from schedc_runtime.moe.hot import NOTHING_HOT, Lending
from schedc_runtime.recompute.adaptive import Arrivals


def arrivals(everyone: Tensor, experts: int, lending: Lending = NOTHING_HOT, slots: int | None = None) -> Arrivals:
    """The rows that a microbatch brings to each rank: the same result on all ranks.

    everyone: [ranks, N, k] routing. lending: hot experts, whose rows stay on their ranks. slots: padded rows of an
    expert from each rank, if there is a capacity: then every rank gets the same number. Dropped choices count in the
    mean.
    """
    ranks, local = everyone.shape[0], experts // everyone.shape[0]
    chosen = everyone.detach().flatten(1).long()
    mean = int((chosen != ABSENT).sum()) / ranks
    if slots is not None:
        return Arrivals((experts * slots,) * ranks, mean)
    kept = chosen[chosen >= 0]
    rows = torch.bincount(kept // local, minlength=ranks)
    for expert in lending.hot:
        own = (chosen == expert).sum(1)
        rows += own
        rows[expert // local] -= own.sum()
    return Arrivals(tuple(rows.tolist()), mean)
