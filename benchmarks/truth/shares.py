"""Runs a word in shares with seeds of their own, on some processes: figures do not depend on how many."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from truth.cases import Options

T = TypeVar("T")


def in_shares(work: Callable[[str, int], T], options: Options, cases: int, share: int) -> list[T]:
    """What ``work(seed, count)`` returns for each share. cases: without a number in the options."""
    whole = options.cases or cases
    counts = [min(share, whole - first) for first in range(0, whole, share)]
    seeds = [f"{options.seed}.{number}" for number in range(len(counts))]
    if options.jobs == 1:
        return [*map(work, seeds, counts)]
    with ProcessPoolExecutor(options.jobs) as processes:
        return [*processes.map(work, seeds, counts)]
