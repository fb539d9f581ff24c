"""Opens the schedules of the library at numbers of ranks and microbatches, with every number of stages per rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.elaborate.sizes import parameter_of_role
from schedc.inputs import open_input
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.load.library import names
from schedc.step.costs.costs import Costs
from schedc.syntax.tree import ScheduleTree

MOST_PER_RANK = 8
"""Stages per rank up to which the library is opened."""


class SizedSchedule(NamedTuple):
    """A legal schedule of the library. sizes: those to give to `schedc check`."""

    name: str
    sizes: dict[str, int]
    schedule: Schedule

    @property
    def per_rank(self) -> int:
        """Stages that a microbatch passes on a rank: v. A chunk takes a v-th of what the rank does for it."""
        return self.schedule.stages // self.schedule.ranks


def library_at(ranks: int, microbatches: int, per_rank: int | None = None) -> Iterator[SizedSchedule]:
    """The schedules of the library that are legal at these sizes, in the order of their names.

    per_rank: keep those with as many stages on a rank; None: all up to `MOST_PER_RANK`. A schedule with segments of a
    sequence is left out, as its ops are others. One with a `policy` is opened at its own other sizes.
    """
    for name in names():
        tree = open_input(name)
        if not isinstance(tree, ScheduleTree) or any(each.role == "segments" for each in tree.parameters):
            continue
        roles = {"ranks": ranks, "microbatches": microbatches}
        sizes = {parameter_of_role(tree, role).name: value for role, value in roles.items()}
        more = [each.name for each in tree.parameters if each.name not in sizes]
        chosen = [{more[0]: value} for value in range(1, MOST_PER_RANK + 1)] if more and not tree.has_policy else [{}]
        for other in chosen:
            try:
                schedule = legal_schedule(tree, {**sizes, **other})
            except DiagnosticError:
                continue  # the sizes are none of this schedule's
            sized = SizedSchedule(name, {**sizes, **other}, schedule)
            if sized.per_rank in (range(1, MOST_PER_RANK + 1) if per_rank is None else (per_rank,)):
                yield sized


def ordered_by(sized: SizedSchedule, costs: Costs) -> SizedSchedule:
    """The schedule as its policy orders it under these costs of a chunk; the same without a policy."""
    tree = open_input(sized.name)
    if not isinstance(tree, ScheduleTree) or not tree.has_policy:
        return sized
    return sized._replace(schedule=legal_schedule(tree, sized.sizes, costs))


def same_placement(placement: Placement, microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Names and orders of the library whose ops lie on the ranks as these do."""
    for name, _, schedule in library_at(placement.ranks, microbatches, placement.stages // placement.ranks):
        if schedule.placement == placement:
            yield name, schedule
