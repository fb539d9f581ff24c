"""Constants and figures that move one at a time: what plans take then, and where another plan overtakes the first."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from schedc.diagnostics import RequestError
from schedc.planner.answers.settings import USABLE, Setting, chosen_settings, settings_of
from schedc.planner.answers.sliders import Slider, sliders_of
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.problem import PlanProblem
from schedc.planner.times.skew import LOADS, LOADS_NAME
from support.short_search import short_search

pytestmark = pytest.mark.slow

PLANS = {
    "llama-3.1-8b": [
        PlanAxes(1, 1, 1, 1, 1, 16, 1, 1, 4, "1f1b"),
        PlanAxes(2, 1, 1, 1, 1, 8, 1, 1, 8, "1f1b", recompute="act"),
        PlanAxes(2, 1, 4, 1, 1, 2, 1, 1, 32, "zbh1"),
        PlanAxes(2, 1, 4, 1, 1, 2, 0, 2, 16, "1f1b", layout="balanced"),
    ],
    "qwen3-30b-a3b": [
        PlanAxes(1, 1, 1, 1, 8, 16, 1, 4, 1, "1f1b"),
        PlanAxes(1, 1, 2, 2, 8, 8, 1, 1, 8, "dualpipev", overlap=True),
        PlanAxes(1, 1, 2, 2, 16, 8, 1, 2, 4, "dualpipev", overlap=True, alltoall="hierarchical"),
        PlanAxes(1, 1, 1, 1, 8, 16, 2, 2, 2, "1f1b"),
        PlanAxes(1, 1, 2, 2, 4, 8, 1, 1, 8, "zbv"),
    ],
}
MOVED = {"llama-3.1-8b": (), "qwen3-30b-a3b": ("launch", "ep", LOADS_NAME, "infiniband.Bps", USABLE)}
"""Settings by model, all for the first one."""


def priced(name: str) -> list[PricedPlan]:
    model, cluster = replace(open_model(name), layers=16).at(2048), open_cluster("h100", 16)
    loads = {"spread": LOADS, "assumed": True} if model.moe else {}
    problem = PlanProblem(model, cluster, 64, {"gemm": 0.7, "dp": 0.5}, **loads)
    steps = [
        PlannedStep(problem, axes, open_choice(axes.schedule), PartTable.of(problem, [axes.split]))
        for axes in PLANS[name]
    ]
    return sorted((price_plan(step) for step in steps), key=lambda plan: plan.step)


@pytest.fixture(scope="module", params=PLANS)
def moved(request: pytest.FixtureRequest) -> Iterator[tuple[list[PricedPlan], tuple[Slider, ...]]]:
    with short_search():
        plans = priced(request.param)
        yield plans, sliders_of(plans, chosen_settings(plans[0].planned.problem, MOVED[request.param]))


def step_at(plan: PricedPlan, setting: Setting, value: float) -> float:
    """The step of a plan where a setting has another value, alone and from its files."""
    planned = plan.planned
    own = planned.problem
    problem = setting.at(value) if setting.at else replace(own, constants={**own.constants, setting.name: value})
    table = PartTable.of(problem, [planned.axes.split])
    return price_plan(replace(planned, problem=problem, table=table, placed=planned.layout)).step


def test_steps_are_prices_of_the_changed_problem(moved: tuple[list[PricedPlan], tuple[Slider, ...]]) -> None:
    plans, sliders = moved
    rng = random.Random(3)
    for slider in sliders:
        setting = slider.setting
        if setting.name == USABLE:
            continue
        at = rng.randrange(len(setting.values))
        expected = [step_at(plan, setting, setting.values[at]) for plan in plans]
        assert slider.steps[at].tolist() == pytest.approx(expected, rel=1e-12), setting.name
        assert slider.steps[setting.values.index(setting.value)].tolist() == [plan.step for plan in plans]
        assert slider.matters == (np.ptp(slider.steps, axis=0).max() > 0)


def test_plans_take_equally_long_at_a_tie(moved: tuple[list[PricedPlan], tuple[Slider, ...]]) -> None:
    """Between a tie and the present value the order of both plans stays, and it changes behind the tie."""
    plans, sliders = moved
    ties = [tie for slider in sliders for tie in slider.ties if slider.setting.name != USABLE]
    assert len(ties) >= 2
    for tie in ties:
        pair = plans[0], plans[tie.plan]
        first, other = (step_at(plan, tie.setting, tie.value) for plan in pair)
        assert other == pytest.approx(tie.step_s, rel=1e-12)
        assert other <= first if tie.setting.whole else other == pytest.approx(first, rel=2e-9)
        for share in (0.25, 0.75, 0.97):
            nearer = tie.setting.value ** (1 - share) * tie.value**share
            if not tie.setting.whole:
                first, other = (step_at(plan, tie.setting, nearer) for plan in pair)
                assert first < other
        beyond = tie.value * (tie.value / tie.setting.value) ** 0.02
        if not tie.setting.whole and tie.setting.values[0] <= beyond <= tie.setting.values[-1]:
            first, other = (step_at(plan, tie.setting, beyond) for plan in pair)
            assert other < first


def test_every_change_of_order_has_a_tie(moved: tuple[list[PricedPlan], tuple[Slider, ...]]) -> None:
    for slider in moved[1]:
        for plan in range(1, len(moved[0])):
            overtakes = (slider.steps[:, plan] < slider.steps[:, 0]) & np.isfinite(slider.steps[:, 0])
            assert overtakes.any() <= any(tie.plan == plan for tie in slider.ties), slider.setting.name
        assert [abs(tie.far) for tie in slider.ties] == sorted(abs(tie.far) for tie in slider.ties)


def test_memory_is_a_limit() -> None:
    plans = priced("llama-3.1-8b")
    (slider,) = sliders_of(plans, chosen_settings(plans[0].planned.problem, (USABLE,)))
    needed = [plan.needed for plan in plans]
    bytes = plans[0].planned.problem.cluster.device.hbm_bytes
    for value, steps in zip(slider.setting.values, slider.steps.tolist(), strict=True):
        assert [np.isfinite(step) for step in steps] == [need <= value * bytes for need in needed]
    (tie,) = slider.ties
    assert tie.value * bytes == pytest.approx(needed[0])
    assert needed[tie.plan] < needed[0]
    assert tie.step_s == min(plan.step for plan in plans if plan.needed < needed[0])


def names_of(settings: Sequence[Setting]) -> list[str]:
    return [setting.name for setting in settings]


def test_settings_are_chosen_by_name_or_level() -> None:
    problem = priced("llama-3.1-8b")[0].planned.problem
    level = ["infiniband.Bps", "infiniband.alpha_s", "infiniband.nics", "infiniband.oversubscription"]
    assert names_of(chosen_settings(problem, ("infiniband", "gemm"))) == ["gemm", *level]
    for asked, help in (("gem", "did you mean `gemm`?"), ("infiniband.Bsp", "did you mean `infiniband.Bps`?")):
        with pytest.raises(RequestError, match="S719") as error:
            chosen_settings(problem, (asked,))
        assert error.value.diagnostics[0].help == help


def test_values_make_sense() -> None:
    problem = priced("llama-3.1-8b")[0].planned.problem
    names = {*names_of(settings_of(problem))}
    assert {constant.name for constant in CONSTANTS} < names
    assert {"device.peak.bf16", "device.hbm_Bps", USABLE, "nvlink.Bps", "infiniband.nics"} < names
    for setting in settings_of(problem):
        assert setting.value in setting.values
        assert list(setting.values) == sorted(set(setting.values))
        assert setting.least <= setting.values[0] < setting.values[-1] <= setting.most
        assert setting.width == problem.known.widths.get(setting.name, 0.0)
        if setting.width:
            ends = [setting.far(value) for value in (setting.values[0], setting.values[-1])]
            assert ends[0] == pytest.approx(-3)
            assert ends[1] == pytest.approx(3) or setting.values[-1] == setting.most
        if setting.whole:
            assert all(isinstance(value, int) or value == setting.value for value in setting.values)
