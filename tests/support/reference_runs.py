"""Computes the reference results of many cases, each on one rank only, and gives all of them to every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

Case = TypeVar("Case")
Result = TypeVar("Result")


def spread(compute: Callable[[Case], Result], cases: Sequence[Case]) -> list[Result]:
    """[cases] what ``compute`` gives for each case. Rank r computes every world-size-th case from case r on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts: list[list[Result]] = [[] for _ in range(ranks)]
    dist.all_gather_object(parts, [compute(case) for case in cases[rank::ranks]])
    return [parts[index % ranks][index // ranks] for index in range(len(cases))]
