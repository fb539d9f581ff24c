"""Where a plan is among the best: figures of the machine that are changed one at a time."""

from __future__ import annotations

from dataclasses import replace

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.search.region import FACTORS, FIGURES, region_of
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem


def test_a_plan_of_less_memory_is_among_the_best_where_memory_is_short() -> None:
    """Recomputed layers hold little and take long: they come first only where nothing else fits."""
    model, cluster = open_model("llama-3.1-8b").at(16384), open_cluster("h100", 8)
    texts = ("tp == 2", "cp == 1", "pp == 1", "microbatch == 1", "zero == 1", "schedule == 1f1b")
    conditions = [read_condition(text) for text in texts]
    space = PlanSpace.of(model, cluster, 64, 16384, "standard", conditions)
    own = replace(space, conditions=(*conditions, read_condition("recompute == layer")), _orders={})
    problem = PlanProblem(model, cluster, 64)
    seen: list[int] = []
    regions = list(region_of(space, own, problem, 1, lambda _stage, count: seen.append(count)))
    assert [region.what for region in regions] == [figure.what for figure in FIGURES]
    assert len(seen) >= len(FIGURES) * len(FACTORS) - 2  # a share of the peak is at most 1
    memory = next(region for region in regions if region.what == "usable memory")
    assert memory.value == cluster.device.usable_bytes / 1e9
    assert memory.inside
    assert max(memory.inside) < memory.value
    assert all(value in memory.tried for value in memory.inside)
