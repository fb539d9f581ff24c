"""Plan files of the planner: `schedc check` and the planner agree to 1e-9."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.model.layer import Layer
from schedc.model.sizes import LayerKind
from schedc.model.spread import Spread
from schedc.plan.layout.parts import WORK, PartKind
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import OrderKey, known_order
from schedc.planner.price.part_table import OP, PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.price.recomputed import LEVELS
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.price.states import held_parameters, kind_parameters
from schedc.planner.price.waterfall import mfu, waterfall
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.space.schedules import all_schedules
from schedc.planner.times.problem import PlanProblem
from schedc.step.batch import simulate_batch
from schedc.step.costs.batch import CostBatch
from schedc.step.peak_counts import PeakCounts
from support.sweeps import halved

PANGU = PlanProblem(open_model("pangu-ultra-moe-718b").at(8192), open_cluster("ascend-910b", 6144), 4608)
LLAMA = PlanProblem(open_model("llama-3.1-8b").at(4096), open_cluster("h100", 64), 512)
GPT2 = PlanProblem(open_model("gpt2").at(1024), open_cluster("h100", 8), 32)
CASES = [
    (PANGU, PlanAxes(8, 1, 16, 2, 32, 48, 1, 1, 96, "interleaved_1f1b", alltoall="hierarchical")),
    (PANGU, PlanAxes(8, 1, 16, 1, 32, 48, 1, 1, 96, "1f1b", recompute="layer", layout="balanced")),
    (PANGU, PlanAxes(8, 1, 16, 1, 64, 48, 2, 1, 96, "zbh1", recompute="full", where="first_half")),
    (GPT2, PlanAxes(1, 1, 1, 1, 1, 8, 1, 1, 4, "1f1b")),
    (LLAMA, PlanAxes(2, 1, 4, 1, 1, 8, 1, 2, 32, "1f1b")),
    (LLAMA, PlanAxes(1, 2, 4, 2, 1, 8, 0, 1, 64, "interleaved_1f1b", recompute="act", where="chunk0")),
    (LLAMA, PlanAxes(2, 2, 4, 1, 1, 4, 1, 2, 64, "zbh1")),
    (PANGU, PlanAxes(8, 2, 16, 2, 32, 24, 1, 1, 192, "dualpipev", alltoall="hierarchical", overlap=True)),
    (PANGU, PlanAxes(4, 2, 16, 2, 32, 48, 1, 1, 96, "dualpipev", alltoall="flat", overlap=True, recompute="layer")),
]


def planned(problem: PlanProblem, axes: PlanAxes) -> PlannedStep:
    choices = {choice.name: choice for choice in all_schedules()[0]}
    table = PartTable.of(problem, [axes.split])
    return PlannedStep(problem, axes, choices[axes.schedule], table)


def priced(problem: PlanProblem, axes: PlanAxes) -> PricedPlan:
    return price_plan(planned(problem, axes))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("problem", "axes"), halved(CASES), ids=lambda value: getattr(value, "schedule", ""))
def test_check_says_what_the_planner_says(problem: PlanProblem, axes: PlanAxes, tmp_path: Path) -> None:
    plan = priced(problem, axes)
    plan_file, cost_file = tmp_path / "01.sched", tmp_path / "01.costs.toml"
    plan_file.write_text(plan.plan_text)
    cost_file.write_text(plan.cost_text)
    quiet = CliRunner().invoke(main, ["fmt", "--check", str(plan_file)])
    assert quiet.exit_code == 0, quiet.output
    result = CliRunner().invoke(main, ["check", str(plan_file), "--cost-file", str(cost_file), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    makespan = facts["cells"]["makespan"]["inside"] if "cells" in facts else facts["makespan"]
    assert makespan == pytest.approx(plan.makespan, rel=1e-9)
    assert max(facts["peak_memory"]) == pytest.approx(max(plan.peaks), rel=1e-9)


def test_a_plan_that_does_not_fit_has_a_price() -> None:
    small, large = (planned(LLAMA, PlanAxes(tp, 1, 1, 1, 1, 64 // tp, 0, 1, 8 * tp, "1f1b")) for tp in (8, 1))
    assert price_plan(small).fits
    assert not price_plan(large).fits


def test_files_say_what_the_tables_say() -> None:
    """The makespan and the peaks of a plan by hand: stages from columns, one order under many costs."""
    problem, axes = CASES[1]
    plan = priced(problem, axes)
    table, row, counts = plan.planned.table, plan.planned.row, plan.planned.layout.counts[:, : len(WORK)]
    level = LEVELS.index("layer")
    forward = counts @ table.forward[row, :OP] + table.forward[row, OP]
    backward = [counts @ times[row, :OP] + times[row, OP] for times in (table.input, table.weight)]
    backward[0] = backward[0] + counts @ table.recompute_seconds[row, level]
    order = known_order(plan.planned.choice, OrderKey.of(axes)).dependencies
    batch = CostBatch(*(time[None, :] for time in (forward, *backward)), p2p=table.p2p[row : row + 1])
    assert simulate_batch(order, batch).makespan[0] == pytest.approx(plan.makespan, rel=1e-12)
    held, pending = counts @ table.held[row, level], counts @ table.pending[row]
    peaks = PeakCounts.of(order).peaks(held[None, :], pending[None, :])[:, 0] + counts @ plan.planned.parameter_bytes
    assert peaks == pytest.approx(np.array(plan.peaks), rel=1e-9)


@pytest.mark.parametrize("name", ["pangu-ultra-moe-718b", "deepseek-v3", "qwen3-30b-a3b", "llama-3.1-8b", "gpt2-xl"])
def test_plan_lines_hold_the_bytes_of_the_table(name: str) -> None:
    model = open_model(name).at(4096)
    experts = 8 if model.moe else 1
    problem = PlanProblem(model, open_cluster("h100", 64), 64)
    table = PartTable.of(problem, [RankSplit(ep=experts)])
    for column, kind in ((1, LayerKind.DENSE), (2, LayerKind.MOE)):
        if kind in model.kinds:
            held = [4096 * Layer(model, kind).held(level) for level in LEVELS]
            assert table.held[0, [0, -1], column] == pytest.approx([held[0], held[-1]])
            assert (np.diff(table.held[0, :, column]) <= 0).all()
            assert (np.diff(table.recompute_seconds[0, :, column]) >= 0).all()


def test_sharding_divides_states_among_replicas() -> None:
    model = open_model("llama-3.1-8b")
    dense = 1
    whole, *sharded = (
        held_parameters(kind_parameters(model), Spread(1, 1, 1, 1, 1, 8, zero))[dense] for zero in range(4)
    )
    shares = [share / whole for share in sharded]
    assert shares == pytest.approx([(2 + 4 + 12 / 8) / 18, (2 + 4 / 8 + 12 / 8) / 18, 1 / 8])


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("problem", "axes"), halved(CASES), ids=lambda value: getattr(value, "schedule", ""))
def test_bars_add_up_to_the_step(problem: PlanProblem, axes: PlanAxes) -> None:
    plan = priced(problem, axes)
    bars = dict(waterfall(plan))
    assert sum(bars.values()) == pytest.approx(plan.step, rel=1e-9)
    assert min(bars.values()) >= -1e-9 * plan.step
    absent = {"tensor exchanges": axes.tp == 1, "context exchanges": axes.cp == 1, "expert exchanges": axes.ep == 1}
    assert {what: abs(bars[what]) < 1e-9 for what in absent} == absent
    assert (bars["recomputation"] == 0) == (axes.recompute == "none")
    assert bars["ideal"] / plan.step == pytest.approx(mfu(plan))


def test_skew_is_a_bar_of_its_own() -> None:
    problem, axes = CASES[0]
    even, skewed = (dict(waterfall(priced(replace(problem, skew=skew), axes))) for skew in (1.0, 1.5))
    assert even["expert imbalance"] == pytest.approx(0.0, abs=1e-12)
    assert skewed["expert imbalance"] > 0
    assert skewed["expert exchanges"] > even["expert exchanges"]
    assert skewed["efficiency of products"] == pytest.approx(even["efficiency of products"])


@pytest.mark.parametrize(("tp", "columns"), [(4, 16 * 128 + 256), (8, 8 * 128 + 256), (16, 4 * 128 + 256)])
def test_parameters_follow_the_columns_that_a_tensor_rank_multiplies(tp: int, columns: int) -> None:
    """64 heads of queries, 4 of keys: 1,280 columns into attention on each of 8 ranks."""
    model = open_model("qwen3-235b-a22b").at(4096)
    own = kind_parameters(model, tp=tp)[WORK.index(PartKind.MOE), 0] / tp
    others = kind_parameters(model)[WORK.index(PartKind.MOE), 0] - 4096 * (64 * 128 + 4 * 256)
    assert own == others / tp + 4096 * columns


@pytest.mark.parametrize("recompute", ["none", "full", "layer"])
def test_a_prediction_of_a_model_without_experts_is_a_dense_layer(recompute: str) -> None:
    problem = replace(LLAMA, model=replace(LLAMA.model, mtp=1))
    axes = PlanAxes(2, 1, 4, 1, 1, 8, 1, 2, 32, "1f1b", recompute=recompute)
    plan = priced(problem, axes)
    table, level = plan.planned.table, LEVELS.index(recompute)
    dense, prediction = WORK.index(PartKind.DENSE), WORK.index(PartKind.MTP)
    assert table.held[0, level, prediction] == table.held[0, level, dense] > 0
    assert table.recompute_seconds[0, level, prediction] == table.recompute_seconds[0, level, dense]
    assert (table.recompute_seconds[0, level, dense] > 0) == (recompute != "none")
    columns = StageColumns.of_plans([plan.planned])
    makespan = simulate_batch(
        known_order(plan.planned.choice, OrderKey.of(axes)).dependencies, columns.batch()
    ).makespan
    assert makespan[0] == pytest.approx(plan.makespan, rel=1e-12)
