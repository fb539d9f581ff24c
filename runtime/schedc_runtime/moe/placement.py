"""Which expert lies at which place of a layer: a permutation, and the numbers by which choices follow it.

    place     0 1 | 2 3       rank 0 has places 0 and 1
    expert    0 3 | 2 1       behind a swap of experts 1 and 3

Router, drops, auxiliary loss, loads and states know experts. Counts, routes, exchanges and products know places. A rank
renumbers its choices before it counts them, because the numbers of distinct tokens by rank follow places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from schedc_runtime.device.choice import brought
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import ABSENT, DROPPED


class RowRun(NamedTuple):
    """Experts with neighbouring numbers at neighbouring places. expert: the first. place: its place, from the first of
    the rank. experts: their number."""

    expert: int
    place: int
    experts: int


@dataclass(frozen=True)
class ExpertPlaces:
    """The experts of a layer by place. order: [experts] the expert at each place, those of rank 0 first."""

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise RuntimeFault(
                f"a placement {list(self.order)}, which is no permutation", "give the number of each expert once"
            )

    @staticmethod
    def home(experts: int) -> ExpertPlaces:
        """The placement of a layer whose experts have not moved."""
        return ExpertPlaces(tuple(range(experts)))

    @property
    def is_home(self) -> bool:
        """Whether every expert is at the place of its number."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """[experts] the place of each expert."""
        places = [0] * len(self.order)
        for place, expert in enumerate(self.order):
            places[expert] = place
        return tuple(places)

    def swapped(self, *pairs: tuple[int, int]) -> ExpertPlaces:
        """The placement behind swaps of two experts each, one after the other."""
        order, places = list(self.order), list(self.places)
        for one, other in pairs:
            order[places[one]], order[places[other]] = other, one
            places[one], places[other] = places[other], places[one]
        return ExpertPlaces(tuple(order))

    def by_expert(self, rows: Tensor) -> Tensor:
        """[experts, ...] ``rows`` by place, in the order of experts."""
        return rows if self.is_home else rows.index_select(0, torch.tensor(self.places, device=rows.device))


def part_of(whole: Tensor, held: Sequence[int]) -> Tensor:
    """[held, ...] the rows of ``whole`` [experts, ...] that belong to the experts ``held``: a view where they follow
    each other."""
    runs = list(runs_of(held))
    if len(runs) == 1:
        return whole.narrow(0, runs[0].expert, runs[0].experts)
    return whole.index_select(0, torch.tensor(held, device=whole.device))


def runs_of(held: Sequence[int]) -> Iterator[RowRun]:
    """The runs of experts at places one after the other. held: the expert at each place."""
    first = 0
    for place in range(1, len(held) + 1):
        if place == len(held) or held[place] != held[place - 1] + 1:
            yield RowRun(held[first], first, place - first)
            first = place


class PlacedNumbers:
    """The numbers of a placement on the device of the first choices. Their memory stays, so that captured launches
    follow a later placement."""

    def __init__(self, placement: ExpertPlaces) -> None:
        self._placement = placement
        self._numbers: tuple[Tensor, Tensor] | None = None

    def take(self, placement: ExpertPlaces) -> None:
        """Follow another placement from now on. The host waits for nothing."""
        self._placement = placement
        if self._numbers is not None:
            for mine, other in zip(self._numbers, _numbers(placement, self._numbers[0].device), strict=True):
                mine.copy_(other)

    def of_choices(self, index: Tensor) -> Tensor:
        """[N, k] the places of choices ``index`` [N, k] of experts, int64. Marks of dropped choices follow; what is no
        expert stays none."""
        table, _ = self._on(index.device)
        row = (index + (len(self._placement.order) + 3)).clamp_(0, len(table) - 1)
        return table.index_select(0, row.reshape(-1)).view(index.shape)

    def of_experts(self, counts: Tensor) -> Tensor:
        """[experts] ``counts`` [experts] by place, in the order of experts."""
        return counts.index_select(0, self._on(counts.device)[1])

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._numbers is None:
            self._numbers = _numbers(self._placement, device)
        return self._numbers


def _numbers(placement: ExpertPlaces, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table [2 experts + 4] from -experts - 3 to experts, and [experts] the places.

    The table's first and last rows stay out of range. Between them lie marks, `ABSENT`, `DROPPED` and experts.
    """
    experts, places = len(placement.order), list(placement.places)
    marks = [ABSENT - 1 - place for place in reversed(places)]
    table = [ABSENT - 1 - experts, *marks, ABSENT, DROPPED, *places, experts]
    numbers = brought([*table, *places], device)
    return numbers[: len(table)], numbers[len(table) :]
