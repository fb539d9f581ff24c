"""Bounds and floors of plans with pairs: they agree with what the compiler makes of the files of the plans."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from schedc.plan.price_cells import stage_graphs
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import OrderKey
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan, read_back
from schedc.planner.search.bound import PlanBounds, splits_of
from schedc.planner.search.candidates import gather
from schedc.planner.search.simulated import Orders, simulate_plans
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.step.cells.floors import floor_batch
from support.short_search import short_search

SMALL = ("overlap", "cp == 1", "microbatch == 1", "pp in 1, 2, 4", "tp <= 2", "ep >= 8")


class Drawn:
    """Forty plans with pairs of a small space, with the bounds of their steps."""

    def __init__(self, model: str) -> None:
        required = [read_condition(text) for text in SMALL]
        few = replace(open_model(model), layers=8)
        space = PlanSpace.of(few, open_cluster("h100", 64), 128, 4096, "standard", required)
        problem = PlanProblem(space.model, space.cluster, 128)
        table = PartTable.of(problem, splits_of(space))
        bounds = PlanBounds(space, problem, table)
        known = gather(bounds.blocks())
        fixed = np.flatnonzero(~known.policy).tolist()
        self.places, self.step = random.Random(3).sample(fixed, 40), known.step
        self.orders, self.usable = Orders(space.choice), bounds.usable
        axes = {place: known.axes(place) for place in self.places}
        self.plans = {
            place: PlannedStep(problem, each, space.choice(each.schedule), table) for place, each in axes.items()
        }


@pytest.fixture(scope="module", params=["qwen3-30b-a3b", "glm-4.5-air"])
def drawn(request: pytest.FixtureRequest) -> Drawn:
    return Drawn(request.param)


@pytest.mark.slow
@short_search()  # graphs do not depend on the order inside of cells
def test_graphs_are_those_of_the_files_of_a_plan(drawn: Drawn) -> None:
    for place in drawn.places[:3]:
        result = read_back(drawn.plans[place])
        assert drawn.plans[place].graphs[0] == stage_graphs(result.schedule, result.costs)[0]


def test_floors_are_those_of_each_plan(drawn: Drawn) -> None:
    for place in drawn.places[:4]:
        planned = drawn.plans[place]
        order = drawn.orders.of(OrderKey.of(planned.axes)).dependencies
        costs = planned.table.cell_costs(planned.row, planned.choice.splits)
        latency = planned.table.p2p[[planned.row]]
        assert drawn.orders.floors.of([planned], order) == pytest.approx(
            floor_batch(order, planned.graphs[0], [costs], latency), rel=1e-12
        )


@pytest.mark.slow
def test_no_floor_is_below_its_bound(drawn: Drawn) -> None:
    bounds = {planned: float(drawn.step[place]) for place, planned in drawn.plans.items()}
    found = simulate_plans(list(bounds.items()), drawn.orders, drawn.usable)
    share = np.array([bounds[each.planned] / each.step_s for each in found])
    assert not drawn.orders.refused
    assert len(found) > 20
    assert share.max() <= 1.0
    assert np.median(share) > 0.85


@pytest.mark.slow
def test_no_price_is_below_its_floor(drawn: Drawn) -> None:
    found = simulate_plans([(planned, 0.0) for planned in drawn.plans.values()], drawn.orders, drawn.usable)[:3]
    prices = [price_plan(each.planned).step for each in found]
    assert all(each.step_s <= price * (1 + 1e-12) for each, price in zip(found, prices, strict=True))
    assert any(each.step_s > price * 0.9 for each, price in zip(found, prices, strict=True))
