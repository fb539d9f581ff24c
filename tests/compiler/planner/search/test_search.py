"""A search finds the same as a trial of every plan, has the compiler's figures, and says the open rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schedc.diagnostics import RequestError
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.search.answer import Answer
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.result import FoundPlan, SearchResult
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.schedules import all_schedules
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from support.short_search import short_search
from support.sweeps import halved, swept


def searched(model: str, devices: int, conditions: tuple[str, ...], layers: int = 0, **options: object) -> SearchResult:
    required = [read_condition(text) for text in conditions]
    sizes = open_model(model)
    few = replace(sizes, layers=layers or sizes.layers)
    space = PlanSpace.of(few, open_cluster("h100", devices), 64, 4096, "standard", required)
    return search(space, PlanProblem(space.model, space.cluster, 64), SearchOptions(policy_seconds=0.0, **options))  # type: ignore[arg-type]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "conditions"),
    halved(
        [
            ("llama-3.1-8b", 16, ("pp >= 2", "tp <= 2", "microbatch == 1", "zero == 1", "cp == 1")),
            (
                "qwen3-30b-a3b",
                16,
                ("pp == 4", "tp == 1", "cp == 1", "zero == 1", "ep in 1, 4", "not overlap", "vpp <= 2"),
            ),
        ]
    ),
)
def test_a_search_finds_what_trying_all_plans_finds(model: str, devices: int, conditions: tuple[str, ...]) -> None:
    best, every = (searched(model, devices, conditions, exhaustive=all_plans) for all_plans in (False, True))
    assert not best.certificate.ended_early
    assert best.certificate.complete == (best.certificate.policies.left == 0)
    assert [plan.step_s for plan in best.plans] == pytest.approx([plan.step_s for plan in every.plans], rel=1e-12)
    assert every.counts.simulated > best.counts.simulated
    assert best.counts.bounded == best.space.legal == every.space.legal
    keys = {(plan.step_s, plan.peak_bytes, plan.axes.schedule) for plan in best.plans}
    assert len(keys) == len(best.plans) == 10
    for plan in best.plans:
        assert plan.priced is not None
        assert plan.floor_s <= plan.step_s * (1 + 1e-12)
        assert plan.priced.step == pytest.approx(plan.step_s, rel=1e-9)
        assert max(plan.priced.peaks) + plan.priced.reserve == pytest.approx(plan.peak_bytes, rel=1e-9)
    steps = [point.step_s for point in best.pareto]
    assert steps == sorted(steps)
    assert [point.peak_bytes for point in best.pareto] == sorted(
        (point.peak_bytes for point in best.pareto), reverse=True
    )


FRONTS = [
    ("llama-3.1-8b", ("pp in 2, 4", "tp == 1", "microbatch == 1", "cp == 1", "vpp == 1")),
    (
        "qwen3-30b-a3b",
        ("pp == 2", "tp == 1", "cp == 1", "ep == 8", "overlap", "vpp == 2", "microbatch == 1", "alltoall == flat"),
    ),
]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("model", "conditions"), swept(FRONTS, FRONTS[:1]))
@short_search()
def test_a_front_is_that_of_all_plans(model: str, conditions: tuple[str, ...]) -> None:
    front, every = (
        searched(model, 16, conditions, 8, objective="pareto", exhaustive=all_plans) for all_plans in (False, True)
    )
    assert not front.certificate.ended_early
    points, all_points = ([(point.step_s, point.peak_bytes) for point in found.pareto] for found in (front, every))
    assert len(points) == len(all_points) > 1
    np.testing.assert_allclose(points, all_points, rtol=1e-12)
    assert every.counts.priced + every.counts.simulated > front.counts.priced + front.counts.simulated
    assert [(plan.step_s, plan.peak_bytes) for plan in front.plans] == points[:10]


@short_search()
def test_overlapped_plans_are_priced_inside_cells() -> None:
    conditions = ("pp == 2", "tp == 1", "cp == 1", "zero == 1", "ep == 8", "overlap", "vpp == 2", "recompute == act")
    result = searched("qwen3-30b-a3b", 16, (*conditions, "microbatch == 1", "alltoall == flat"), layers=8, top=1)
    assert not result.certificate.ended_early
    assert result.counts.priced >= 1
    assert result.plans[0].axes.overlap
    assert result.plans[0].floor_s <= result.plans[0].step_s * (1 + 1e-12)


def test_of_equal_plans_one_with_a_fixed_order_is_named() -> None:
    choices = {choice.name: choice for choice in all_schedules()[0]}
    model, cluster = open_model("qwen3-30b-a3b").at(4096), open_cluster("h100", 16)
    problem, answer = PlanProblem(model, cluster, 64), Answer(1)
    table = PartTable.of(problem, [RankSplit(ep=8)])
    for name in ("adaptive_pipe", "interleaved_overlap"):
        axes = PlanAxes(1, 1, 2, 2, 8, 8, 1, 1, 8, name, overlap=True)
        answer.add(FoundPlan(PlannedStep(problem, axes, choices[name], table), 1.0, 2.0, b"order", 1.0))
    (named,) = answer.plans()
    assert named.axes.schedule == "interleaved_overlap"
    assert named.free == {"schedule": ("adaptive_pipe",)}


def test_a_limit_of_time_leaves_a_gap() -> None:
    result = searched("llama-3.1-8b", 16, ("pp >= 2",), seconds=0.0)
    assert result.certificate.ended_early
    assert not result.certificate.complete
    assert result.certificate.bound_s > 0
    assert result.certificate.kth_s is None


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(RequestError) as raised:
        searched("llama-3.1-405b", 8, ("pp == 8",))
    assert raised.value.diagnostics[0].code == "S714"
