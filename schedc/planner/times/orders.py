"""Dependencies of schedules at the sizes of a run, each elaborated once."""

from __future__ import annotations

from functools import lru_cache

from schedc.compiler import price
from schedc.inputs import open_input
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.syntax.input import Input


@lru_cache(maxsize=64)
def _opened(schedule: str) -> Input:
    return open_input(schedule)


@lru_cache(maxsize=512)
def order_of(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> Dependencies:
    """The dependencies of a schedule at sizes. Raises `DiagnosticError` for sizes that the schedule refuses."""
    return ordered_by(schedule, ranks, microbatches, chunks, 0, None)


@lru_cache(maxsize=512)
def stages_at(schedule: str, ranks: int, microbatches: int, chunks: int = 1, limit: int = 0) -> int:
    """Stages of a schedule at sizes. Raises `DiagnosticError` for sizes that the schedule refuses."""
    if limit:
        return ordered_by(schedule, ranks, microbatches, chunks, limit, None).schedule.stages
    return order_of(schedule, ranks, microbatches, chunks).schedule.stages


def ordered_by(
    schedule: str, ranks: int, microbatches: int, chunks: int, limit: int, costs: Costs | None
) -> Dependencies:
    """The dependencies of a schedule that is ordered by costs, within ``limit`` activations of a rank if it has one."""
    tree = _opened(schedule)
    by_role = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    sizes = {size.name: by_role[size.role] for size in tree.parameters if size.role in by_role}
    if limit:
        sizes["limit"] = limit
    return price(tree, sizes, costs).dependencies
