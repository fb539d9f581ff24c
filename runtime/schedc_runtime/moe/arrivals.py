"""Tells the rows that a route brings to each rank, for the decision whether to recompute."""

from __future__ import annotations

from schedc_runtime.moe.sizes import Sizes
from schedc_runtime.recompute.adaptive import Arrivals


def arrivals_of(sizes: Sizes, top: int) -> Arrivals:
    """The rows that a microbatch brings to each rank: the same on all ranks. top: choices of a token.

    Rows of hot experts count where they stay. With a capacity every rank gets the same number. Dropped choices count in
    the mean.
    """
    return Arrivals(sizes.ranks, sum(sizes.tokens) * top / len(sizes.tokens))
