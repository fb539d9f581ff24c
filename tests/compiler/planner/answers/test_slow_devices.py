"""The step of a plan with slow devices, against stages with longer costs and against every placement."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import combinations

import numpy as np
import pytest

from schedc.planner.answers import slow_devices
from schedc.planner.answers.slow_devices import PacedCells, SlowDevices, same_plan
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, order_of, price_plan
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.step.timeline import simulate
from support.short_search import short_search
from support.written_plans import GPT2

LLAMA = PlanProblem(open_model("llama-3.1-8b").at(4096), open_cluster("h100", 48), 240)
QWEN = PlanProblem(replace(open_model("qwen3-30b-a3b"), layers=8).at(4096), open_cluster("h100", 16), 64)
PLAIN = [
    PlanAxes(1, 1, 4, 1, 1, 2, 1, 1, 8, "1f1b"),
    PlanAxes(1, 1, 4, 1, 1, 2, 1, 1, 8, "zbh1", recompute="layer", layout="balanced"),
    PlanAxes(1, 1, 2, 2, 1, 4, 1, 1, 4, "zbv", recompute="layer", where="first_half"),
]
OVERLAPPED = PlanAxes(1, 1, 2, 2, 8, 8, 1, 1, 8, "interleaved_overlap", recompute="full", overlap=True)


def priced(problem: PlanProblem, axes: PlanAxes) -> PricedPlan:
    return price_plan(PlannedStep(problem, axes, open_choice(axes.schedule), PartTable.of(problem, [axes.split])))


def slow(problem: PlanProblem, factor: float, devices: int) -> SlowDevices:
    space = PlanSpace.of(problem.model, problem.cluster, problem.sequences, problem.model.seq, "standard")
    return SlowDevices(factor, devices, space)


def longer(plan: PricedPlan, ranks: tuple[int, ...], factor: float) -> float:
    """Seconds of the pipeline whose stages on these ranks have costs that are so many times as long."""
    planned, schedule = plan.planned, order_of(plan.planned).dependencies.schedule
    costs = StageColumns.of_plans([planned]).costs()
    pace = [factor if rank in ranks else 1.0 for rank in planned.placement.rank_of_stage[0].tolist()]

    def times(of: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(time * each for time, each in zip(of, pace, strict=True))

    own = {name: times(getattr(costs, name)) for name in ("F", "I", "W", "recompute_in_backward")}
    return simulate(schedule, replace(costs, **own)).makespan


@pytest.mark.parametrize("axes", PLAIN, ids=lambda axes: axes.schedule)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_slow_rank_has_longer_costs(axes: PlanAxes, devices: int) -> None:
    """At the worst of all placements; the optimizer ends with the slow devices, messages and sums stay."""
    plan = priced(GPT2, axes)
    result = slow(GPT2, 1.2, devices).step(plan)
    pipelines = {ranks: longer(plan, ranks, 1.2) for ranks in combinations(range(axes.pp), devices)}
    assert (len(result.ranks), result.all_tried) == (devices, True)
    assert pipelines[result.ranks] == pytest.approx(max(pipelines.values()), rel=1e-12)
    beside = plan.beside.step_of(max(pipelines.values())) + 0.2 * plan.beside.optimizer
    assert result.step_s == pytest.approx(float(beside), rel=1e-12)
    assert plan.step < result.step_s < 1.2 * plan.step


@pytest.mark.parametrize(("problem", "axes"), [(GPT2, PLAIN[2]), (QWEN, OVERLAPPED)])
@short_search()
def test_paced_cells_are_those_of_the_price(problem: PlanProblem, axes: PlanAxes) -> None:
    """Ranks of one pace, with messages of that pace, take exactly so many times as long."""
    plan = priced(problem, axes)
    cells = PacedCells.of(plan)
    assert cells.seconds(np.ones(axes.pp)) == pytest.approx(plan.makespan, rel=1e-12)
    all_slow = replace(cells, latency=1.5 * cells.latency).seconds(np.full(axes.pp, 1.5))
    assert all_slow == pytest.approx(1.5 * plan.makespan, rel=1e-12)
    first, last = (cells.seconds(np.array(pace)) for pace in ([1.5, 1.0], [1.0, 1.5]))
    assert plan.makespan < min(first, last) <= max(first, last) < all_slow
    worst = slow(problem, 1.5, 1).step(plan)
    assert worst.ranks == ((0,) if first >= last else (1,))


def test_where_not_all_placements_are_tried_the_step_is_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = priced(GPT2, PLAIN[0])
    exact = slow(GPT2, 1.3, 2).step(plan)
    monkeypatch.setattr(slow_devices, "_PLACEMENTS", 0)
    greedy = slow(GPT2, 1.3, 2).step(plan)
    assert (exact.all_tried, greedy.all_tried, len(greedy.ranks)) == (True, False, 2)
    assert slow(GPT2, 1.3, 1).step(plan).step_s < greedy.step_s <= exact.step_s
    assert slow(GPT2, 1.3, 8).step(plan).ranks == (0, 1, 2, 3)


def test_without_a_node_the_plan_has_the_most_replicas_that_share_the_batch() -> None:
    axes = PlanAxes(1, 1, 2, 2, 1, 24, 2, 2, 5, "zbv", recompute="layer", where="all", layout="even")
    smaller = slow(LLAMA, 1.2, 1).step(priced(LLAMA, axes)).without
    assert smaller is not None
    there = replace(LLAMA, cluster=open_cluster("h100", 40))
    same = priced(there, replace(axes, dp=20, microbatches=6))
    assert (smaller.devices, smaller.dp) == (40, 20)
    assert smaller.step_s == pytest.approx(same.step, rel=1e-12)
    two = slow(LLAMA, 1.2, 2).step(priced(LLAMA, axes)).without
    assert two is not None
    assert (two.devices, two.dp) == (24, 12)  # 15 replicas have 30 devices, which are no whole nodes
    assert slow(LLAMA, 1.2, 6).step(priced(LLAMA, axes)).without is None
    assert slow(GPT2, 1.2, 1).step(priced(GPT2, PLAIN[0])).without is None


def test_only_the_same_plan_with_other_replicas_meets_the_conditions() -> None:
    axes = replace(OVERLAPPED, dp=5)
    conditions = same_plan(OVERLAPPED, 5, slow(QWEN, 1.2, 1).space)

    def met(plan: PlanAxes) -> bool:
        return all(bool(condition.holds(asdict(plan))) for condition in conditions)

    assert met(axes)
    others = {"schedule": "zbh1", "recompute": "none", "where": "chunk0", "layout": "balanced", "alltoall": "allgather"}
    for name, value in asdict(axes).items():
        other = others.get(name, not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "")
        assert met(replace(axes, **{name: other})) == (name in ("microbatches", "spare")), name
