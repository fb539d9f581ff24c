"""Plans under common draws: shares of draws by hand, what decides, what is worth knowing, and that draws are common."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.ir.arrays import Floats
from schedc.planner.answers.chances import PlanChances
from schedc.planner.answers.drawn_plans import DrawsAsked, compare_plans, drawn_constants
from schedc.planner.answers.measuring import STEPS, measured_by
from schedc.planner.fit.estimate import needed
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import plan_seconds, price_plan
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.schedules import open_choice
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.skew import LOADS
from schedc.planner.times.table import RunTable


def test_shares_of_draws_by_hand() -> None:
    """The plan of row 3 is that of row 1 in other words; plans 0 and 1 tie in the last draw."""
    steps = np.array([[10.0, 10.0, 10.0, 10.0], [11.0, 9.0, 10.4, 10.0], [40.0, 50.0, 60.0, 70.0]])
    chances = PlanChances(np.vstack([steps, steps[1] * (1 + 1e-13)]))
    assert chances.first_in.tolist() == [2.5 / 4, 1.5 / 4, 0.0, 1.5 / 4]
    assert chances.first_in[chances.one_each].sum() == 1.0
    assert chances.within.tolist() == [3 / 4, 3 / 4, 0.0, 3 / 4]
    assert chances.loss[0] == pytest.approx((10 / 9 - 1) / 4)
    assert chances.favourites == (0, 1)
    assert PlanChances(steps[::2]).favourites == (0, None)


def drawn_steps(rng: np.random.Generator, draws: int = 200) -> tuple[Floats, dict[str, Floats]]:
    """Two plans that a constant ``x`` decides between, half as much as ``y`` does; ``z`` has no part in it."""
    logs = {name: rng.normal(size=draws) for name in "xyz"}
    gap = 0.05 * logs["x"] - 0.1 * logs["y"]
    return np.exp(np.stack([np.zeros(draws), gap, gap + 0.5])), logs


def test_what_decides_and_what_is_worth_knowing() -> None:
    """Two normal constants move the gap by 0.05 and 0.1: a fifth and four fifths of its variance. The third none."""
    steps, logs = drawn_steps(np.random.default_rng(3), 4000)
    chances = PlanChances(steps)
    (y, x) = chances.deciding(0, 1, logs)
    assert (y.name, y.favours_first, x.name, x.favours_first) == ("y", False, "x", True)
    assert (y.share, x.share) == pytest.approx((0.8, 0.2), abs=0.04)
    worths = chances.worths(logs, 0)
    assert [each.name for each in worths] == ["y", "x"]
    assert worths[0].share < chances.loss[[0, 1]].min()


def test_no_fit_is_named_for_a_constant_that_none_estimates() -> None:
    """Not even of rows whose expert groups lie in several domains."""
    problem = PlanProblem(open_model("qwen3-30b-a3b").at(4096), open_cluster("h100", 64), 256)
    axes = [PlanAxes(1, 1, 1, 1, ep, 64, 1, 1, 4, "1f1b") for ep in (16, 32)]
    estimated = {each.name for each in needed(RunTable([TrainingRun(problem, each) for each in axes]))}
    never = {each.name for each in CONSTANTS if each.needs is None}
    assert never == {"crowd"}
    assert estimated - never == estimated >= {"ep", "ep_alpha", "ep_peer"}
    assert STEPS not in {measured_by(name) for name in never}


def test_labels_without_meaning_are_worth_nothing() -> None:
    """Of 300 constants that decide nothing, at most 3 are named. Without the guard most of them have a worth."""
    rng = np.random.default_rng(5)
    named = 0
    for _ in range(3):
        steps, _ = drawn_steps(rng)
        named += len(PlanChances(steps).worths({str(n): rng.normal(size=200) for n in range(100)}, 0))
    assert named <= 3


@pytest.fixture(scope="module")
def compared() -> Any:
    """The plans of a small search under 24 draws, its problem, and the asked draws."""
    model, cluster = open_model("qwen3-30b-a3b").at(2048), open_cluster("h100", 16)
    problem = PlanProblem(model, cluster, 64, spread=LOADS, assumed=True)
    required = [read_condition(text) for text in ("pp == 4", "schedule in 1f1b, zbh1", "zero == 1", "cp == 1")]
    space = PlanSpace.of(model, cluster, 64, 2048, "standard", required)
    found = search(space, problem, SearchOptions(top=3))
    asked = DrawsAsked(24, 7)
    return compare_plans(space, problem, found, [], asked, lambda *_: None), problem, asked


@pytest.mark.slow
def test_all_plans_have_the_same_draws(compared: Any) -> None:
    """The step of each plan in a draw is its price in the problem with the constants and the loads of this draw."""
    plans, problem, asked = compared
    constants = drawn_constants(problem, asked)
    assert (constants["gemm"] == plans.constants["gemm"]).all()
    for number in (0, 13, 23):
        own = {name: float(values[0, number]) for name, values in constants.values.items()}
        there = replace(problem, constants=own, spread=float(constants.loads[0, number]))
        for plan, steps in zip(plans.plans, plans.chances.steps, strict=True):
            table = PartTable.of(there, [plan.axes.split])
            priced = price_plan(PlannedStep(there, plan.axes, plan.choice, table, plan.layout))
            assert steps[number] == pytest.approx(priced.step, rel=1e-9)


@pytest.mark.slow
def test_pairs_of_several_methods_are_priced_together_as_alone() -> None:
    """A plan keeps the graphs of its own exchanges, whatever stands beside it in a table of many vectors."""
    qwen3, h100 = open_model("qwen3-30b-a3b").at(2048), open_cluster("h100", 32)
    problem = PlanProblem(qwen3, h100, 64, spread=LOADS, assumed=True)
    axes = [
        PlanAxes(1, 1, 2, 2, 16, 16, 1, 1, 4, "dualpipev", alltoall=method, overlap=True)
        for method in ("hierarchical", "flat")
    ]
    plans = [PlannedStep(problem, each, open_choice("dualpipev"), PartTable.of(problem, [each.split])) for each in axes]
    constants = drawn_constants(problem, DrawsAsked(20))
    alone = [plan_seconds([plan], constants)[0] for plan in plans]
    assert (plan_seconds(plans, constants) == np.stack(alone)).all()
    assert (plan_seconds(plans[::-1], constants)[::-1] == np.stack(alone)).all()
    assert abs(alone[0] / alone[1] - 1).min() > 1e-4


def test_searches_under_draws_find_plans_that_medians_do_not(compared: Any) -> None:
    """Further plans are near ones of the same space, and each is as fast as the best in some draw."""
    plans, *_ = compared
    others = plans.plans[plans.printed :]
    assert others
    assert len({plan.axes for plan in plans.plans}) == len(plans.plans)
    assert plans.chances.first_in[plans.printed :].max() > 0


def test_draws_of_loads() -> None:
    """Log-normal about the assumed spread. Skews that are said are not drawn."""
    model, cluster = open_model("qwen3-30b-a3b").at(2048), open_cluster("h100", 16)
    problem = PlanProblem(model, cluster, 64, spread=LOADS, assumed=True)
    loads = np.log(drawn_constants(problem, DrawsAsked(2000)).loads)
    assert np.median(loads) == pytest.approx(np.log(LOADS), abs=0.01)
    assert loads.std() == pytest.approx(0.5, abs=0.01)
    assert drawn_constants(replace(problem, assumed=False), DrawsAsked(20)).loads is None
    twenty = drawn_constants(problem, DrawsAsked(20))
    assert (twenty.only(3).loads, twenty.only(3)["ep"]) == (twenty.loads[0, 3], twenty["ep"][0, 3])
    seeds = [drawn_constants(problem, DrawsAsked(20, seed)).loads for seed in (1, 1, 2)]
    assert (seeds[0] == seeds[1]).all()
    assert (seeds[0] != seeds[2]).all()


SMALL = ("plan", "gpt2", "h100", "-D", "devices=8", "--batch", "32x1024", "--require", "pp >= 2 and schedule in 1f1b")


@pytest.mark.slow
def test_a_comparison_on_the_command_line() -> None:
    arguments = (*SMALL, "--top", "2", "--draws", "40", "--also", "tp=2,pp=4", "--json")
    facts = json.loads(CliRunner().invoke(main, arguments).stdout)
    (also,) = facts["also"]
    assert (also["axes"]["tp"], also["axes"]["pp"], also["file"], also["asked"]) == (2, 4, "also", "tp 2, pp 4")
    for plan in (*facts["plans"], also):
        assert 0 <= plan["first_in"] <= plan["within_5_pct"] <= 1
    assert facts["chances"]["draws"] == 40
    assert facts["chances"]["loads"] is None
    text = CliRunner().invoke(main, arguments[:-1]).stdout
    assert "the plan with tp 2, pp 4 is first in " in text.replace("\n  ", " ")
    assert "\nmeasure next: " in text
    without = json.loads(CliRunner().invoke(main, (*SMALL, "--top", "1", "--draws", "off", "--json")).stdout)
    assert (without["chances"], without["plans"][0]["first_in"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--also", "tp=2,pipes=4"), "error[S711]: there is no axis `pipes`"),
        (("--also", "tp=3"), "none is left by `--also 'tp == 3'`"),
        (("--also", "pp=4,schedule=zbh1"), "none is left by `--also 'schedule == zbh1'`"),
        (("--also", ""), "AXIS=VALUE"),
        (("--draws", "1"), "write 20 to 10,000, or `off`"),
        (("--draws", "many"), "write 20 to 10,000, or `off`"),
    ],
)
def test_refusals(arguments: tuple[str, str], said: str) -> None:
    result = CliRunner().invoke(main, (*SMALL, *arguments))
    assert (result.exit_code in (1, 2), said in " ".join(result.stderr.split())) == (True, True), result.stderr
