"""No exact price is below the bound: over random models, clusters and plans."""

from __future__ import annotations

import random

import numpy as np
import pytest

from schedc.plan.price_cells import price_cells
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan, read_back
from schedc.planner.search.bound import PlanBounds, splits_of
from schedc.planner.search.simulated import Orders, simulate_plans
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from support.random_plans import DrawnPlan, random_plan
from support.sweeps import halved, swept

PLANS = swept(10_000, 24)
_CLOSE = 1 + 1e-9


def check_one(rng: random.Random) -> bool:
    """Whether there was a plan. Bound, floor, price and atomic price ascend."""
    drawn = random_plan(rng)
    if drawn is None:
        return False
    planned = drawn.planned
    priced = price_plan(planned)
    assert drawn.step <= priced.step * _CLOSE, planned.axes
    assert drawn.memory <= (max(priced.peaks) + priced.reserve) * _CLOSE, planned.axes
    assert drawn.fits or not priced.fits, planned.axes
    if not planned.choice.by_policy:
        check_floor(drawn, priced)
    if planned.axes.overlap:
        check_cells(planned, priced.makespan)
    return True


def check_floor(drawn: DrawnPlan, priced: PricedPlan) -> None:
    """What a search simulates lies between bound and price, and is the price where nothing overlaps."""
    planned = drawn.planned
    (simulated,) = simulate_plans([(planned, drawn.step)], Orders(lambda _name: planned.choice), np.inf)
    assert drawn.step <= simulated.step_s * _CLOSE, planned.axes
    assert simulated.step_s <= priced.step * _CLOSE, planned.axes
    assert simulated.peak_bytes == pytest.approx(max(priced.peaks) + priced.reserve, rel=1e-9), planned.axes
    if not planned.axes.overlap:
        assert simulated.step_s == pytest.approx(priced.step, rel=1e-9), planned.axes


def check_cells(planned: PlannedStep, makespan: float) -> None:
    read = read_back(planned)
    inside = price_cells(read.dependencies, read.costs)
    assert inside is not None
    assert inside.floor <= inside.late_wait.makespan * _CLOSE, planned.axes
    assert inside.late_wait.makespan == pytest.approx(makespan, rel=1e-9), planned.axes
    assert makespan <= inside.serial.makespan * _CLOSE, planned.axes


@pytest.mark.slow
def test_no_price_is_below_its_bound() -> None:
    assert sum(check_one(random.Random(number)) for number in range(PLANS)) > 0.7 * PLANS


@pytest.mark.slow
def test_stages_recompute_before_their_gradients_arrive() -> None:
    """One microbatch in 15 stages: inside cells the stages before the last one recompute while they wait."""
    assert check_one(random.Random(479))


@pytest.mark.slow
def test_floors_know_the_work_behind_a_message() -> None:
    """Two stages with shared experts: compute behind the first message takes longer than the longest chain."""
    assert check_one(random.Random(3249))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("kind", halved(["standard", "wide"]))
def test_all_plans_are_bounded(kind: str) -> None:
    conditions = [read_condition("pp in 2, 4"), read_condition("microbatch == 1")]
    space = PlanSpace.of(open_model("qwen3-30b-a3b"), open_cluster("h100", 64), 256, 4096, kind, conditions)
    problem = PlanProblem(space.model, space.cluster, space.batch)
    bounds = PlanBounds(space, problem, PartTable.of(problem, splits_of(space)))
    blocks = list(bounds.blocks())
    assert sum(len(bounded.block) for bounded in blocks) == sum(map(len, space.blocks())) > 10_000
    assert all(np.isfinite(bounded.step).all() and (bounded.step > 0).all() for bounded in blocks)
    assert all((bounded.memory > 0).all() for bounded in blocks)
