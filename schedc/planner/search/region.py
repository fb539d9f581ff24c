"""Finds on which machines a plan would be among the best: one figure of the cluster at a time, all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from schedc.diagnostics import RequestError
from schedc.planner.cluster.values import Cluster
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable, RankSplit
from schedc.planner.price.problem import PlanProblem
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.orders import Orders
from schedc.planner.search.simulated import simulate_plans
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import BY_NAME

FACTORS = (0.5, 0.7071, 1.0, 1.4142, 2.0)
"""What each figure is multiplied by."""

_ALIKE = 1e-9


@dataclass(frozen=True)
class Figure:
    """A figure of the machine or of its software. of: its value; at: the problem with another value of it."""

    what: str
    unit: str
    of: Callable[[PlanProblem], float]
    at: Callable[[PlanProblem, float], PlanProblem]
    most: float = float("inf")


@dataclass(frozen=True)
class FigureRegion:
    """Where a plan is among the best ones, by one figure.

    value: the figure as it is. tried: all values that were tried. inside: those at which the plan is among the best
    plans, by the floors of stage 2.
    """

    what: str
    unit: str
    value: float
    tried: tuple[float, ...]
    inside: tuple[float, ...]


def _with_constant(problem: PlanProblem, name: str, value: float) -> PlanProblem:
    return replace(problem, constants={**problem.constants, name: value})


def _with_rail(problem: PlanProblem, value: float) -> PlanProblem:
    levels = problem.cluster.levels
    return _on(problem, replace(problem.cluster, levels=(*levels[:-1], replace(levels[-1], Bps=value))))


def _with_usable(problem: PlanProblem, value: float) -> PlanProblem:
    device = problem.cluster.device
    return _on(problem, replace(problem.cluster, device=replace(device, usable=value * 1e9 / device.hbm_bytes)))


def _on(problem: PlanProblem, cluster: Cluster) -> PlanProblem:
    return replace(problem, cluster=cluster)


FIGURES = (
    Figure("speed of the outer network", "GB/s", lambda p: p.cluster.levels[-1].Bps / 1e9,
           lambda p, value: _with_rail(p, value * 1e9)),
    Figure("products of experts", "of peak", lambda p: p.constant("grouped"),
           lambda p, value: _with_constant(p, "grouped", value), BY_NAME["grouped"].most),
    Figure("usable memory", "GB", lambda p: p.cluster.device.usable_bytes / 1e9, _with_usable),
    Figure("start of an exchange between tensor ranks", "us", lambda p: p.constant("tp_alpha") * 1e6,
           lambda p, value: _with_constant(p, "tp_alpha", value / 1e6)),
)  # fmt: skip


def region_of(
    space: PlanSpace, problem: PlanProblem, axes: PlanAxes, among: int, progress: Callable[[str, int], None]
) -> Iterator[FigureRegion]:
    """By figure, where the plan of these axes is one of the ``among`` best plans of the space.

    Pairs count with their floors, so that no cell is ordered. progress: as for `search`.
    """
    for number, figure in enumerate(FIGURES):
        now = figure.of(problem)
        tried = tuple(value for value in (now * factor for factor in FACTORS) if value <= figure.most)
        inside = []
        for place, value in enumerate(tried):
            progress("machines", number * len(FACTORS) + place + 1)
            if _is_among(space, figure.at(problem, value), axes, among):
                inside.append(value)
        yield FigureRegion(figure.what, figure.unit, now, tried, tuple(inside))


def _is_among(space: PlanSpace, problem: PlanProblem, axes: PlanAxes, among: int) -> bool:
    own = _floor(space, problem, axes)
    if own is None:
        return False
    there = replace(space, cluster=problem.cluster, _orders={})
    try:
        found = search(there, problem, SearchOptions(top=among, policies=0, inside=False))
    except RequestError:
        return True  # nothing else fits, and this plan does
    last = found.certificate.kth_s
    return len(found.plans) < among or last is None or own <= last * (1 + _ALIKE)


def _floor(space: PlanSpace, problem: PlanProblem, axes: PlanAxes) -> float | None:
    """Seconds of a step of the plan, from stage 2; None where it does not fit."""
    choice = space.choice(axes.schedule)

    split = RankSplit(axes.tp, axes.cp, axes.ep, axes.microbatch, axes.alltoall)
    planned = PlannedStep(problem, axes, choice, PartTable.of(problem, [split]))
    found, _ = simulate_plans([(0, planned)], Orders(space.choice), problem.cluster.device.usable_bytes)
    return found[0].step if found else None
