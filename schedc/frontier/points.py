"""Prices the library as points of bubble against memory, and floors as lines, in microbatches of a rank.

A microbatch takes F, I and W of a rank, 1 each by default, and a chunk a v-th of them. `p2p` is in the same unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import NamedTuple

import numpy as np

from schedc.frontier.library import SizedSchedule, library_at, ordered_by
from schedc.search.bounds import OpWindows
from schedc.search.floors import rank_floors
from schedc.search.problem import Freedom, problem_of
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import NAMES
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate

LINES = (1, 2, 4)
"""Stages per rank of the lines."""


class FrontierPoint(NamedTuple):
    """A schedule between bubble and memory.

    bubble: makespan less the work of the busiest rank, in the unit of the costs. memory: microbatches of the fullest
    rank. copies: of the weights. command: the `schedc check` that has the same figures, times v.
    """

    sized: SizedSchedule
    bubble: float
    memory: float
    copies: int
    command: str


@dataclass(frozen=True)
class FloorLine:
    """What no order of a split backward undercuts on one copy of the weights, with v stages per rank on a wave.

    caps: memory of each rank, in microbatches. bubbles: the least, in the unit of the costs, one for each cap.
    """

    per_rank: int
    caps: tuple[float, ...]
    bubbles: tuple[float, ...]


def chunk_costs(costs: Costs, per_rank: int) -> Costs:
    """Costs in which a chunk takes what a microbatch takes on a rank. All figures are then v times as large."""
    return replace(costs, p2p=costs.p2p * per_rank)


def library_points(ranks: int, microbatches: int, costs: Costs) -> Iterator[FrontierPoint]:
    """The schedules of the library at these sizes, under costs of a microbatch on a rank."""
    for sized in library_at(ranks, microbatches):
        own = chunk_costs(costs, sized.per_rank)
        yield point_of(ordered_by(sized, own), own)


def point_of(sized: SizedSchedule, costs: Costs) -> FrontierPoint:
    """A schedule as a point. costs: those of a chunk."""
    timeline, v = simulate(sized.schedule, costs), sized.per_rank
    bubble = timeline.makespan - float(timeline.busy.max())
    memory = float(measure_memory(sized.schedule, costs, timeline.dependencies).peak_memory.max())
    copies = sized.schedule.placement.pipes
    return FrontierPoint(sized, bubble / v, memory / v, copies, command_of(sized, costs))


def command_of(sized: SizedSchedule, costs: Costs) -> str:
    """The `schedc check` of a schedule at its sizes and costs."""
    given, default = {key: getattr(costs, key) for key in NAMES}, Costs()
    sizes = "".join(f" -D {name}={value}" for name, value in sized.sizes.items())
    options = "".join(f" --cost {k}={v:.12g}" for k, v in given.items() if v != getattr(default, k))
    file = "" if costs.cell is None or costs.source is None else f" --cost-file {quote(costs.source.name)}"
    return f"schedc check {quote(sized.name)}{sizes}{options}{file}"


def floor_lines(ranks: int, microbatches: int, costs: Costs) -> Iterator[FloorLine]:
    """A line for each v of `LINES`, at caps from a quarter of P microbatches to P, in steps of half a microbatch."""
    names = {1: "zbh1", **{v: "zb_wave" for v in LINES if v > 1}}
    caps = np.unique(np.append(np.arange(max(1.0, ranks / 4), ranks, 0.5), float(ranks)))
    sized = {each.per_rank: each for each in library_at(ranks, microbatches) if each.name == names.get(each.per_rank)}
    for v, each in sorted(sized.items()):
        yield FloorLine(v, tuple(caps.tolist()), tuple(least_bubbles(each, chunk_costs(costs, v), caps.tolist())))


def least_bubbles(sized: SizedSchedule, costs: Costs, caps: Sequence[float]) -> Iterator[float]:
    """The least bubble of the schedule's ops at each cap, in the unit of the costs of a microbatch."""
    schedule, v = sized.schedule, sized.per_rank
    for cap in caps:
        problem = problem_of(schedule, costs, np.full(schedule.ranks, np.floor(cap * v + 1e-9)), Freedom())
        floors = rank_floors(OpWindows(problem))
        makespan = problem.cost(max(floor.makespan for floor in floors))
        work = problem.time.cost(max(floor.work for floor in floors))
        yield (makespan - work) / v
