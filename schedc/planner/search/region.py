"""Finds on which machines a plan would be among the best: one figure of the cluster at a time, all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from schedc.diagnostics import RequestError
from schedc.planner.cluster.values import Cluster
from schedc.planner.search.best_first import SearchOptions, search
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
    ClusterFigure("speed of the outer network", "GB/s", lambda p: p.cluster.levels[-1].Bps / 1e9,
           lambda p, value: _with_rail(p, value * 1e9)),
    ClusterFigure("products of experts", "of peak", lambda p: p.constant("grouped"),
           lambda p, value: _with_constant(p, "grouped", value), BY_NAME["grouped"].most),
    ClusterFigure("usable memory", "GB", lambda p: p.cluster.device.usable_bytes / 1e9, _with_usable),
    ClusterFigure("start of an exchange between tensor ranks", "us", lambda p: p.constant("tp_alpha") * 1e6,
           lambda p, value: _with_constant(p, "tp_alpha", value / 1e6)),
)  # fmt: skip


def region_of(
    space: PlanSpace, own: PlanSpace, problem: PlanProblem, among: int, progress: Callable[[str, int], None]
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
        found = search(there, problem, SearchOptions(top=top, policies=0, inside=False))
    except RequestError:
        return None
    return found.certificate.kth_s if len(found.plans) == top else None
