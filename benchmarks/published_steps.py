"""Predicts what published optimizations bring a plan of 718 B parameters on 6,144 devices, for `waterfall.py`.

The steps are those that were published of Adaptive Pipe and EDPB: overlap with hierarchical exchange made training
1.375 times as fast, and balancing experts, data and layers 1.255 times more. rho is the fullest rank's rows over the
mean of its expert group. delta is the largest mean square of document lengths of a replica over that of all. Neither is
published: both are inputs here, and printed where they give the published factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import ScheduleChoice, all_schedules
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.problem import PlanProblem

MODEL, CLUSTER, DEVICES, SEQUENCES, TOKENS = "pangu-ultra-moe-718b", "ascend-910b", 6144, 4608, 8192
OVERLAP, BALANCE = 1.375, 1.255
"""The published factors: overlap with hierarchical exchange, and balance."""
EVEN_RHO, EVEN_DELTA = 1.05, 1.02
"""What balancing leaves: rows of the fullest rank, and squared lengths of the fullest replica, over the mean."""
START = PlanAxes(8, 1, 16, 2, 32, 48, 1, 1, 96, "interleaved_1f1b")
"""The published split, with flat exchanges and none of them beside compute."""
HIERARCHICAL = replace(START, alltoall="hierarchical")
PAIRS = replace(HIERARCHICAL, schedule="adaptive_pipe", overlap=True)
LAYERS = replace(PAIRS, layout="balanced")
SCORES = next(constant.median for constant in CONSTANTS if constant.name == "attention")
MOST = 1.6
"""The largest rho that is looked at."""
_ROUNDS, _CLOSE = 6, 0.005
"""Most rounds of a search for rho, and how close its gain comes."""


class Skew(NamedTuple):
    rho: float
    delta: float


@dataclass(frozen=True)
class PredictedStep:
    """what: the optimization that is new. seconds: of a step with all optimizations so far. pct: of the first one's."""

    what: str
    seconds: float
    pct: float


def problem_of(skew: Skew) -> PlanProblem:
    """The model on its devices. All replicas wait at their exchanges for the fullest replica, the source of delta."""
    model, cluster = open_model(MODEL).at(TOKENS), open_cluster(CLUSTER, DEVICES)
    return PlanProblem(model, cluster, SEQUENCES, {"attention": SCORES / skew.delta}, skew=skew.rho)


def planned_step(axes: PlanAxes, skew: Skew) -> PlannedStep:
    problem = problem_of(skew)
    table = PartTable.of(problem, [axes.split])
    return PlannedStep(problem, axes, _choices()[axes.schedule], table)


@lru_cache(maxsize=1)
def _choices() -> dict[str, ScheduleChoice]:
    return {choice.name: choice for choice in all_schedules()[0]}


@lru_cache(maxsize=512)
def seconds_of(axes: PlanAxes, skew: Skew) -> float:
    """Seconds of a step of the plan, as its files are priced."""
    return price_plan(planned_step(axes, skew)).step


def waterfall(skew: Skew) -> list[PredictedStep]:
    """The steps of the plan, each with one optimization more."""
    even = skew._replace(rho=min(skew.rho, EVEN_RHO))
    both = even._replace(delta=min(skew.delta, EVEN_DELTA))
    stages = [
        ("flat", START, skew),
        ("hierarchical", HIERARCHICAL, skew),
        ("overlap", PAIRS, skew),
        ("expert balance", PAIRS, even),
        ("attention balance", PAIRS, both),
        ("layers", LAYERS, both),
    ]
    seconds = [seconds_of(axes, of) for _, axes, of in stages]
    return [
        PredictedStep(what, time, 100 * time / seconds[0]) for (what, *_), time in zip(stages, seconds, strict=True)
    ]


def gain_overlap(skew: Skew) -> float:
    """The step without over the step with hierarchical exchange and overlap."""
    return seconds_of(START, skew) / seconds_of(PAIRS, skew)


def gain_balance(skew: Skew) -> float:
    """The step without over the step with balanced experts, data and layers."""
    even = Skew(min(skew.rho, EVEN_RHO), min(skew.delta, EVEN_DELTA))
    return seconds_of(PAIRS, skew) / seconds_of(LAYERS, even)


def skews_of_balance(deltas: tuple[float, ...]) -> Iterator[dict[str, float | None]]:
    """For each delta the rho at which balance gains what is published, and what both gain there.

    rho is None where none from 1 to `MOST` is found.
    """
    for delta in deltas:
        rho = rho_of_balance(delta)
        if rho is None:
            yield {"delta": delta, "rho": None, "overlap": None, "balance": None}
        else:
            skew = Skew(rho, delta)
            yield {"delta": delta, "rho": rho, "overlap": gain_overlap(skew), "balance": gain_balance(skew)}


def rho_of_balance(delta: float) -> float | None:
    """rho at which balance gains `BALANCE`, by false position between 1 and `MOST`."""
    ends = [1.0, MOST]
    for _ in range(_ROUNDS):
        low, high = (gain_balance(Skew(each, delta)) - BALANCE for each in ends)
        if low > 0 or high < 0:
            return None
        rho = round(ends[0] - low * (ends[1] - ends[0]) / (high - low), 3)
        missing = gain_balance(Skew(rho, delta)) - BALANCE
        if abs(missing) < _CLOSE:
            return rho
        ends[missing > 0] = rho
    return None
