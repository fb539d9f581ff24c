"""Where a search stands while it runs: the share of plans that is decided, the time that is left, the best step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class SearchStanding(NamedTuple):
    """Where a search stands.

    decided: share of the plans within memory that cannot change the answer any more; None for a front. left_s: seconds
    that the rest takes at the pace so far; None while the pace is not known. best_s: the shortest step among plans
    whose step is exact; None before there is one.
    """

    decided: float | None
    left_s: float | None
    best_s: float | None


class SearchProgress(Protocol):
    """Takes the name of a stage, and how many plans it has seen."""

    def __call__(self, stage: str, count: int, standing: Callable[[], SearchStanding] | None = None) -> None:
        """standing: gives the standing of the search, once plans are bounded."""


class OpenWork(NamedTuple):
    """Plans of one kind that may still enter the answer. left: of them. done, spent: plans so far, and CPU seconds."""

    left: int
    done: int
    spent: float

    @property
    def seconds(self) -> float | None:
        """CPU seconds for those left, at the pace so far; None where none was done yet."""
        if not self.left:
            return 0.0
        return self.left * self.spent / self.done if self.done else None


def seconds_left(fixed: OpenWork, priced: OpenWork, ordered: OpenWork, most_ordered_s: float) -> float | None:
    """CPU seconds of the rest: plans to simulate, to price, and to order by their costs.

    most_ordered_s: CPU seconds after which no more are ordered. None while a pace is not known.
    """
    simulating, pricing, ordering = fixed.seconds, priced.seconds, ordered.seconds
    if simulating is None or pricing is None or ordering is None:
        return None
    return simulating + pricing + min(ordering, most_ordered_s)
