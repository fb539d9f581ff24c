"""Intervals of steps: the variance of rows and of constants, what no row decides, and models left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schedc.planner.fit.estimate import Estimator
from schedc.planner.fit.left_out import FACTOR, MOST_FACTOR, LeftOutModel, factor_of
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.intervals import REACH, log_effects, step_intervals
from schedc.planner.price.priced import step_seconds
from schedc.planner.space.axes import PlanAxes
from schedc.planner.times.constants import BY_NAME, NAMES
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.skew import LOADS, LOADS_WIDTH
from schedc.planner.times.spread import ConstantSpread
from schedc.planner.times.table import RunTable
from support.needs import needed

AXES = PlanAxes(1, 1, 2, 1, 8, 8, 1, 1, 8, "1f1b")
RUN = TrainingRun(PlanProblem(open_model("qwen3-30b-a3b").at(4096), open_cluster("h100", 16), 64), AXES)


def with_widths(widths: dict[str, float], rows: float) -> ConstantSpread:
    """Constants at their priors of which only some have a width, in logarithms."""
    known = ConstantSpread.of_priors()
    return replace(known, logs=np.diag([widths.get(name, 1e-6) ** 2 for name in NAMES]), rows=rows)


def test_an_interval_holds_as_many_drawn_steps_as_it_says() -> None:
    """Constants drawn from what is known, and rows about the steps: nine of ten steps are inside."""
    known = ConstantSpread.of_priors()
    known = replace(known, logs=0.04 * known.logs, rows=0.03)
    (interval,) = step_intervals([RUN], known)
    drawn = step_seconds(RunTable([RUN]), known.draws(800, 3))[0]
    (middle,) = step_seconds(RunTable([RUN]), RUN.problem.vectors)[0]
    drawn *= np.exp(0.03 * np.random.default_rng(1).standard_normal(drawn.size))
    low, high = interval.ends(middle)
    assert np.mean((low <= drawn) & (drawn <= high)) == pytest.approx(0.9, abs=0.03)


def test_the_variance_has_its_shares() -> None:
    """All that varies is host and rows: the host's share of the step times its width, and the spread of rows."""
    (interval,) = step_intervals([RUN], with_widths({"host": 0.1}, rows=0.02))
    (middle,) = step_seconds(RunTable([RUN]), RUN.problem.vectors)[0]
    width = 0.1 * 24 * BY_NAME["host"].median / middle
    assert np.log(interval.factor) == pytest.approx(REACH * np.hypot(0.02, width), rel=1e-2)
    assert interval.rows + dict(interval.shares)["host"] == pytest.approx(1.0, abs=1e-3)


def test_what_no_row_decides_widens_a_step_that_needs_it() -> None:
    """Experts that no row has: a plan with experts is less sure than one of a dense model under the same fit."""
    known = with_widths({"ep": 0.4, "grouped": 0.25, "gemm": 0.01}, rows=0.02)
    dense = TrainingRun(replace(RUN.problem, model=open_model("llama-3.1-8b").at(4096)), replace(AXES, ep=1))
    of_dense, of_experts = step_intervals([dense, RUN], known)
    assert of_experts.width_pct > 1.5 * of_dense.width_pct
    assert {"ep", "grouped"} <= {name for name, _ in of_experts.shares}
    assert "ep" not in dict(of_dense.shares)


def test_an_assumed_spread_of_loads_widens_a_step() -> None:
    """By its share of the variance alone, where constants are known and rows are close."""
    known, spread = with_widths({}, rows=0.02), replace(RUN.problem, spread=LOADS)
    said, assumed = (
        step_intervals([replace(RUN, problem=replace(spread, assumed=each))], known)[0] for each in (False, True)
    )
    ends = [LOADS * np.exp(LOADS_WIDTH * side) for side in (-1, 1)]
    runs = [replace(RUN, problem=replace(spread, spread=end)) for end in ends]
    low, high = np.log(step_seconds(RunTable(runs), RUN.problem.vectors)[:, 0])
    assert said.factor == pytest.approx(np.exp(REACH * 0.02), rel=1e-4)
    assert np.log(assumed.factor) == pytest.approx(REACH * np.hypot(0.02, (high - low) / 2), rel=1e-4)
    assert dict(assumed.shares)["loads"] == pytest.approx(1 - assumed.rows, abs=1e-3)


def test_effects_count_what_shows_only_at_the_ends() -> None:
    """max(0, x) does not change below 0, and half as fast as x over both sides of it."""
    values = log_effects(lambda points: np.maximum(0.0, points.T[:1]), np.zeros(2), np.ones(2), np.array([2.0, 0.5]))
    assert values.tolist() == [[0.5, 0.0]]


def test_models_left_out_set_how_far_rows_are_off() -> None:
    """Rows twice as far off as they say need twice their spread, and more where models are few."""
    stdtrit = needed("scipy.special").stdtrit
    estimator = Estimator(RunTable([RUN]), np.array([1.0]))
    part = estimator.at_spread(np.arange(0), 0.05)
    draw = np.random.default_rng(0)

    def model(number: int, off: float = 2.0) -> LeftOutModel:
        ratios = np.expm1(off * 0.05 * draw.standard_normal(50))
        return LeftOutModel(str(number), ratios, np.zeros((50, len(estimator.names))), part)

    many, few = factor_of([model(number) for number in range(40)]), factor_of([model(0), model(1)])
    assert many == pytest.approx(2.0, rel=0.07)
    assert few / many == pytest.approx(stdtrit(2, 0.95) / stdtrit(40, 0.95), rel=0.3)
    assert factor_of([]) == FACTOR
    assert factor_of([model(0, 9.0), model(1, 9.0)]) == MOST_FACTOR
