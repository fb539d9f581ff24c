"""Bars of waterfalls: none is negative, and they add up to the step, whatever the plan spreads work over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan
from schedc.planner.price.waterfall import waterfall
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.problem import PlanProblem
from support.short_search import short_search
from support.sweeps import swept

PLANS = {
    "dense": ("llama-3.1-8b", PlanAxes(2, 1, 4, 2, 1, 4, 1, 1, 8, "interleaved_1f1b", recompute="full")),
    "balanced layout": ("llama-3.1-8b", PlanAxes(1, 1, 8, 1, 1, 4, 0, 1, 16, "zbh1", layout="balanced")),
    "context and zero 3": ("llama-3.1-8b", PlanAxes(2, 4, 2, 1, 1, 2, 3, 2, 8, "zbh2", recompute="act")),
    "experts": ("qwen3-30b-a3b", PlanAxes(1, 1, 4, 1, 16, 16, 2, 1, 8, "1f1b", recompute="layer", where="first_half")),
    "experts without a pipeline": ("mixtral-8x7b", PlanAxes(4, 1, 1, 1, 8, 8, 3, 2, 2, "1f1b")),
    "pairs": ("qwen3-30b-a3b", PlanAxes(1, 1, 2, 2, 8, 8, 3, 2, 8, "dualpipev", overlap=True)),
    "pairs and predictions": ("deepseek-v3", PlanAxes(1, 1, 8, 2, 16, 16, 1, 1, 16, "dualpipev", overlap=True)),
    "an order by costs": ("gpt2", PlanAxes(1, 1, 4, 1, 1, 2, 1, 1, 8, "zb_auto")),
}
CONSTANTS = {"ep": 0.4, "launch": 2e-3, "chunk": 1e-3, "p2p": 0.3, "cp": 0.2}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("skew", swept([1.0, 1.6], [1.6]))
@pytest.mark.parametrize("name", PLANS)
def test_no_bar_is_negative(name: str, skew: float) -> None:
    model, axes = PLANS[name]
    cluster = open_cluster("h100", axes.devices)
    few = replace(open_model(model), layers=16)
    problem = PlanProblem(few.at(2048), cluster, axes.batch, CONSTANTS, skew=skew)
    planned = PlannedStep(problem, axes, open_choice(axes.schedule), PartTable.of(problem, [axes.split]))
    with short_search():
        plan = price_plan(planned)
        bars = waterfall(plan)
    assert [bar for bar in bars if bar.seconds < 0] == []
    assert sum(bar.seconds for bar in bars) == pytest.approx(plan.step, rel=1e-12)
    assert len(bars) == len({bar.what for bar in bars}) == 14
