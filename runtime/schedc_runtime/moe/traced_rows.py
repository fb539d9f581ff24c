"""How evenly experts are loaded in a traced step: what each microbatch's routing gives the ranks of an expert group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from schedc_runtime.moe.planner import routed


class RoutedRows(NamedTuple):
    """Rows of the experts of one rank for a microbatch of a layer; of the fullest rank of its group; their mean."""

    own: int
    most: int
    mean: float


class TracedRows:
    """A context in which routes that are planned are kept. Their counts are brought to the host when they are read."""

    def __enter__(self) -> TracedRows:
        self.planned: list[Any] = []
        """[layers] the `Counts` of a microbatch. Their tables stay on the device."""
        routed.append(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        routed.remove(self._keep)

    def _keep(self, route: Any) -> None:
        if not route.shape.padded:  # with a capacity all ranks have the same rows
            self.planned.append(route.counts)

    def take(self) -> list[Any]:
        """The counts that were planned since the last call."""
        planned, self.planned = self.planned, []
        return planned


def rows_of_routes(planned: Sequence[Sequence[Any]]) -> list[list[RoutedRows]]:
    """[instructions] the rows of what each has planned. Waits for the device once."""
    shapes = [[counts.shape for counts in each] for each in planned]
    tables = [counts.rows.sum(0).view(counts.shape.ranks, -1).sum(1) for each in planned for counts in each]
    numbers = iter(torch.cat(tables).tolist() if tables else [])
    return [[_rows_of(shape.rank, [next(numbers) for _ in range(shape.ranks)]) for shape in each] for each in shapes]


def _rows_of(rank: int, by_rank: Sequence[int]) -> RoutedRows:
    return RoutedRows(by_rank[rank], max(by_rank), sum(by_rank) / len(by_rank))
