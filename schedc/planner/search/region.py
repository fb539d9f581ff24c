"""Finds on which machines a plan would be among the best: one figure of the cluster at a time, all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from schedc.diagnostics import RequestError
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.standing import SearchProgress
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import BY_NAME
from schedc.planner.times.problem import PlanProblem

FACTORS = (0.5, 0.6, 0.7, 0.85, 1.0, 1.4, 2.0)
"""What each figure is multiplied by."""

_ALIKE = 1e-9


@dataclass(frozen=True)
class ClusterFigure:
    """A figure of the machine or of its software, which has a value in a problem, and other values in other ones."""

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


def _with_constant(name: str, unit: float = 1.0) -> Callable[[PlanProblem, float], PlanProblem]:
    """Sets a constant of the cost model. unit: of the values that it is set to."""
    return lambda problem, value: replace(problem, constants={**problem.constants, name: value / unit})


def _with_rail(problem: PlanProblem, value: float) -> PlanProblem:
    *inner, outermost = problem.cluster.levels
    levels = (*inner, replace(outermost, Bps=value * 1e9))
    return replace(problem, cluster=replace(problem.cluster, levels=levels))


def _with_usable(problem: PlanProblem, value: float) -> PlanProblem:
    device = problem.cluster.device
    usable = replace(device, usable=value * 1e9 / device.hbm_bytes)
    return replace(problem, cluster=replace(problem.cluster, device=usable))


FIGURES = (
    ClusterFigure(
        "speed of the outer network", "GB/s", lambda problem: problem.cluster.levels[-1].Bps / 1e9, _with_rail
    ),
    ClusterFigure(
        "products of experts",
        "of peak",
        lambda problem: problem.constant("grouped"),
        _with_constant("grouped"),
        BY_NAME["grouped"].most,
    ),
    ClusterFigure("usable memory", "GB", lambda problem: problem.cluster.device.usable_bytes / 1e9, _with_usable),
    ClusterFigure(
        "start of an exchange between tensor ranks",
        "us",
        lambda problem: problem.constant("tp_alpha") * 1e6,
        _with_constant("tp_alpha", 1e6),
    ),
)


def region_of(
    space: PlanSpace, own: PlanSpace, problem: PlanProblem, among: int, progress: SearchProgress
) -> Iterator[FigureRegion]:
    """By figure, where the best plan of ``own`` is one of the ``among`` best plans of the space.

    own: the part of the space that has the axes of the plan. Pairs count with their floors, so that no cell is ordered.
    progress: as for `search`.
    """
    for number, figure in enumerate(FIGURES):
        now = figure.of(problem)
        tried = tuple(value for value in (now * factor for factor in FACTORS) if value <= figure.most)
        inside = []
        for place, value in enumerate(tried):
            progress("machines", number * len(FACTORS) + place + 1)
            if _is_among(space, own, figure.at(problem, value), among):
                inside.append(value)
        yield FigureRegion(figure.what, figure.unit, now, tried, tuple(inside))


def _is_among(space: PlanSpace, own: PlanSpace, problem: PlanProblem, among: int) -> bool:
    best = _last(own, problem, 1)
    if best is None:
        return False
    last = _last(space, problem, among)
    return last is None or best <= last * (1 + _ALIKE)


def _last(space: PlanSpace, problem: PlanProblem, top: int) -> float | None:
    """Seconds of the last of the best plans, by floors; None where fewer fit."""
    there = replace(space, cluster=problem.cluster, _orders={})
    try:
        result = search(there, problem, SearchOptions(top=top, policy_seconds=0.0, inside=False))
    except RequestError:
        return None
    return result.certificate.kth_s if len(result.plans) == top else None
