"""Prices of plans with pairs: the least over orders that were found beforehand, which no speed or constant changes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.load.library import open_schedule
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import OrderKey, known_order
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import plan_seconds, price_plan, read_back
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import ScheduleChoice, open_choice
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import PlanProblem
from schedc.step.cells.cell_forms import cell_forms
from schedc.step.cells.fixed_programs import FixedPrograms
from schedc.step.dependencies import Dependencies
from support.short_search import short_search

V3 = PlanAxes(1, 1, 2, 2, 16, 16, 1, 1, 8, "dualpipev_nosplit", overlap=True, layout="even", alltoall="hierarchical")
QWEN = PlanAxes(1, 1, 4, 1, 8, 8, 1, 1, 8, "1f1b_overlap", overlap=True, layout="even", recompute="medium")
PLANS = {
    "deepseek-v3": V3,
    "qwen3-30b-a3b": QWEN,
    "glm-4.5-air": replace(V3, schedule="interleaved_overlap", alltoall="flat", layout="balanced"),
    "kimi-k2": replace(V3, schedule="dualpipev", recompute="act"),
}
LAYERS = 8


def planned(model: str, axes: PlanAxes, cluster: str = "h100", **constants: float) -> PlannedStep:
    sizes = replace(open_model(model), layers=LAYERS).at(4096)
    problem = PlanProblem(sizes, open_cluster(cluster, axes.devices), axes.batch, constants)
    return PlannedStep(problem, axes, open_choice(axes.schedule), PartTable.of(problem, [axes.split]))


def order_of(plan: PlannedStep) -> Dependencies:
    return known_order(plan.choice, OrderKey.of(plan.axes)).dependencies


@pytest.mark.parametrize(("model", "axes", "lanes"), [("deepseek-v3", V3, 2), ("qwen3-30b-a3b", QWEN, 1)])
def test_orders_follow_from_the_model_alone(model: str, axes: PlanAxes, lanes: int) -> None:
    known = planned(model, axes).orderings
    other = planned(model, replace(axes, dp=2 * axes.dp, microbatch=2), "b200", gemm=0.3, launch=0.1, ep=0.1)
    assert other.orderings == known
    assert len(known) == {1: 8, 2: 9}[lanes]
    for times in known:
        segments = dict(times.segments)
        layer = [segments[name] for name in ("attention", "permute", "experts", "post", "shared") if name in segments]
        assert sum(map(sum, layer)) == pytest.approx(1.0, abs=1e-3)
        assert {name.partition(".")[0] for name, _ in times.exchanges} == {"dispatch", "combine"}
        assert len(times.exchanges) == 2 * lanes


def raised(costs: CellCosts, at: int, factor: float) -> CellCosts:
    """The costs with one segment or exchange that takes longer."""
    parts = [*costs.segments, *costs.exchanges]
    name, times = parts[at]
    parts[at] = name, SegmentTimes(*(time * factor for time in times))
    count = len(costs.segments)
    return replace(costs, segments=tuple(parts[:count]), exchanges=tuple(parts[count:]))


@pytest.mark.slow
@short_search()
def test_no_step_falls_where_a_part_of_a_cell_takes_longer() -> None:
    """Twice all times is twice the step, to the last bit. A part is at times all that a step waits for."""
    moved = 0
    for plan in itertools.starmap(planned, PLANS.items()):
        costs, order = plan.table.cell_costs(plan.row, plan.choice.splits), order_of(plan)
        count = len(costs.segments) + len(costs.exchanges)
        whole = replace(costs, segments=(), exchanges=())
        for at in range(count):
            whole = raised(whole if at else costs, at, 2.0)
        longer = [raised(costs, at, factor) for at in range(count) for factor in (1.02, 1.5, 30.0)]
        batch = CellCostBatch.of([costs, whole, *longer])
        p2p = np.full(len(batch), plan.table.p2p[plan.row])
        p2p[1] *= 2
        step = FixedPrograms.of(order, cell_forms(order, *plan.graphs), plan.orderings).times(batch, p2p).makespan
        least = step.min(axis=0)
        assert least[1] == 2 * least[0]
        assert (least[2:] >= least[0] * (1 - 1e-12)).all()
        moved += int((least[2:] > least[0] * (1 + 1e-9)).sum())
    assert moved > 60


@pytest.mark.slow
def test_steps_under_many_constants_are_those_of_each() -> None:
    """Also where ranks do not wait for each other. Files have the order of the constants that they are for."""
    rng = np.random.default_rng(2)
    vectors = np.exp(rng.normal(0, 0.8, (5, 3)))
    names = ("ep", "gemm", "launch")
    used = set()
    for plan in [planned("deepseek-v3", V3, "h800"), planned("qwen3-30b-a3b", QWEN)]:
        free = replace(plan, problem=replace(plan.problem, stack=replace(plan.problem.stack, free_steps=True)))
        for each in (plan, free):
            many = plan_seconds([each], ConstantVectors.of(names, vectors))[0]
            for vector, seconds in zip(vectors.tolist(), many.tolist(), strict=True):
                problem = replace(each.problem, constants=dict(zip(names, vector, strict=True)))
                alone = replace(each, problem=problem, table=PartTable.of(problem, [each.axes.split]))
                price = price_plan(alone)
                assert seconds == pytest.approx(price.step, rel=1e-12)
                line = read_back(alone).predicted
                assert price.makespan == (line.span.max() if each is free else line.makespan)
                used.add(alone.orderings.index(alone.ordered_by))
    assert len(used) > 2


PAIRED = """sched 1

## Pairs where ranks may have them.
schedule paired(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r { policy prefer F & B > B > F  cap F - B <= 2*(P-r)+1 { repeat M { F }  repeat M { B } } }
}
"""


def test_an_order_of_ops_that_follows_the_costs_has_cells_of_one_order(tmp_path: Path) -> None:
    path = tmp_path / "paired.sched"
    path.write_text(PAIRED, encoding="utf-8")
    axes = replace(QWEN, schedule=str(path), pp=2)
    plan = replace(
        planned("qwen3-30b-a3b", replace(axes, schedule="1f1b")),
        axes=axes,
        choice=ScheduleChoice(open_schedule(str(path)), str(path), False),
    )
    assert (plan.choice.by_policy, plan.choice.has_pairs) == (True, True)
    assert len(plan.orderings) == 1
    assert price_plan(plan).makespan == read_back(plan).predicted.makespan
