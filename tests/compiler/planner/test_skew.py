"""The fullest rank of an expert group against drawn loads, published figures of the law, and scipy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan, step_seconds
from schedc.planner.search.bound import PlanBounds, splits_of
from schedc.planner.space.axes import RankSplit
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.schedules import open_choice
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.skew import fullest_rank, lower_gamma, recorded_skew, spread_of
from schedc.planner.times.table import RunTable
from support.needs import needed
from support.sweeps import thinned
from support.training_runs import run_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "ranks", "spread"), [(256, 64, 0.31), (256, 256, 0.57), (64, 8, 1.5), (128, 64, 4.0), (8, 2, 0.4)]
)
def test_the_fullest_rank_of_drawn_loads(experts: int, ranks: int, spread: float) -> None:
    """To half a percent of 20,000 draws: rows of all experts of a rank, added up."""
    loads = np.random.default_rng(1).gamma(1 / spread**2, size=(20_000, experts))
    of_ranks = loads.reshape(-1, ranks, experts // ranks).sum(axis=2)
    drawn = float((of_ranks.max(axis=1) / of_ranks.mean(axis=1)).mean())
    assert fullest_rank(experts, ranks, spread) == pytest.approx(drawn, rel=0.005)


def test_it_grows_with_the_group_and_with_the_spread() -> None:
    of_groups = [fullest_rank(256, ranks, 0.31) for ranks in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert of_groups == sorted(of_groups)
    assert of_groups[0] == 1.0
    assert of_groups[3:] == pytest.approx([1.08, 1.14, 1.25, 1.41, 1.68, 2.13], rel=0.02)
    of_spreads = [fullest_rank(64, 8, spread) for spread in (0.0, 0.01, 0.1, 0.4, 1.0, 2.0, 4.0)]
    assert of_spreads == sorted(of_spreads)
    assert of_spreads[-1] < 8


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("fullest", thinned([1.01, 1.4, 3.0], 3))
def test_the_spread_of_a_fullest_rank(fullest: float) -> None:
    spread = spread_of(256, 32, fullest, 4.0)
    assert spread is not None
    assert fullest_rank(256, 32, spread) == pytest.approx(fullest, rel=1e-9)
    assert spread_of(256, 32, 31.9, 4.0) is None
    assert spread_of(256, 1, 1.5, 4.0) is None


@pytest.mark.parametrize("shape", [0.06, 0.5, 3.0, 100.0, 250.0])
def test_the_incomplete_gamma_function(shape: float) -> None:
    special = needed("scipy.special")
    x = np.linspace(0, 400, 501)
    assert np.abs(lower_gamma(shape, x) - special.gammainc(shape, x)).max() < 1e-12


def test_drawn_spreads_of_loads_price_like_their_problems() -> None:
    """Each of K vectors has a spread of its own: the step is that of the problem with this spread, to 1e-12."""
    model, cluster = open_model("qwen3-30b-a3b").at(4096), open_cluster("h100", 16)
    of_dp = {ep: {"pp": 2, "ep": ep, "dp": 8, "microbatches": 4, "sequence_parallel": True} for ep in (1, 4, 8)}
    runs = [run_of(model, cluster, **given) for given in of_dp.values()]
    spreads = [0.2, 0.8, 0.4]
    drawn = replace(ConstantVectors.of((), np.zeros((3, 0))), loads=np.array([spreads]))
    steps = step_seconds(RunTable(runs), drawn)
    for column, spread in enumerate(spreads):
        own = [TrainingRun(replace(run.problem, spread=spread), run.axes) for run in runs]
        alone = step_seconds(RunTable(own), ConstantVectors.of((), np.zeros((1, 0))))
        assert steps[:, column] == pytest.approx(alone[:, 0], rel=1e-12)
    assert (steps[0] == steps[0, 0]).all()
    assert (steps[1:, 1] > 1.01 * steps[1:, 0]).all()


def counted(loads: np.ndarray[Any, np.dtype[np.float64]], ranks: int) -> float:
    """Rows of the fullest of so many ranks over the mean. loads: [samples, experts] rows of experts."""
    of_ranks = loads.reshape(len(loads), ranks, -1).sum(axis=2)
    return float((of_ranks.max(axis=1) / of_ranks.mean(axis=1)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.2, 0.4, 0.8])
def test_a_recorded_routing_says_the_fullest_rank_of_other_groups(spread: float) -> None:
    """Eight ranks are recorded. Fewer have rows of neighbours, exactly; 16 and 32 are within 3 % of counting."""
    rng, layers, microbatches, experts = np.random.default_rng(7), 12, 40, 128
    shares = rng.dirichlet(np.full(experts, 1 / spread**2), layers * microbatches)
    loads = np.array([rng.multinomial(4 * 4096 * 8, share) for share in shares], np.float64)
    recorded = loads.reshape(layers, microbatches, 8, -1).sum(axis=3)
    skew = recorded_skew(experts, recorded, 4.0)
    assert skew.spread is not None
    assert dict(skew.fullest) == pytest.approx({ranks: counted(loads, ranks) for ranks in (1, 2, 4, 8)}, rel=1e-12)
    for ranks in (16, 32):
        assert fullest_rank(experts, ranks, skew.spread) == pytest.approx(counted(loads, ranks), rel=0.03)
    assert recorded_skew(experts, recorded.sum(axis=2, keepdims=True), 4.0).spread is None


def test_runs_take_recorded_rows_and_the_law_beyond_them() -> None:
    problem = PlanProblem(
        open_model("qwen3-30b-a3b").at(4096),
        open_cluster("h100", 16),
        64,
        spread=0.5,
        recorded=((1, 1.0), (2, 1.2), (4, 1.4)),
    )
    skews = [problem.run(RankSplit(ep=ep)).skew for ep in (1, 2, 4, 8)]
    assert skews == [1.0, 1.2, 1.4, fullest_rank(128, 8, 0.5)]


def test_the_fullest_rank_holds_its_rows() -> None:
    """Rows of experts and buffers are held as often as the fullest rank has more; files count even rows.

    What is held grows in proportion to the rows beyond the mean, and the bound stays below it.
    """
    model, cluster = open_model("qwen3-30b-a3b").at(4096), open_cluster("h100", 16)
    texts = ("pp == 2", "tp == 1", "cp == 1", "ep == 8", "microbatch == 1", "schedule == 1f1b", "alltoall == flat")
    space = PlanSpace.of(model, cluster, 64, 4096, "standard", [read_condition(each) for each in (*texts, "zero == 1")])
    priced, bounds, buffers = {}, {}, []
    for skew in (1.0, 1.5, 2.0):
        problem = PlanProblem(model, cluster, 64, skew=skew)
        table = PartTable.of(problem, splits_of(space))
        buffers.append(table.reserve[0, 0, 0])
        (bounded,) = PlanBounds(space, problem, table).blocks()
        for number in bounded.block.numbers().tolist():
            axes = bounded.block.axes(number)
            plan = price_plan(PlannedStep(problem, axes, open_choice("1f1b"), table))
            places = np.unravel_index(number, bounded.block.legal.shape)
            bounds[skew, axes] = bounded.memory[(*places[:4], places[5])]
            priced[skew, axes] = plan
            assert bounds[skew, axes] <= plan.needed * (1 + 1e-12)
            assert plan.peaks == priced[1.0, axes].peaks
    assert buffers[2] - buffers[0] == 4 * 4096 * 8 * model.hidden == 2 * (buffers[1] - buffers[0])
    plans = {axes for _, axes in priced}
    assert len(plans) == 15
    for axes in plans:
        even, half, twice = (priced[skew, axes].needed for skew in (1.0, 1.5, 2.0))
        assert twice > half > even
        assert twice - even == pytest.approx(2 * (half - even))
    none = {axes.recompute: axes for axes in plans if axes.layout == "even"}
    rows = 4096 * 8 * 8 * 2 * model.hidden
    growth = priced[2.0, none["none"]].needed - priced[1.0, none["none"]].needed
    assert growth > 24 * 2 * rows / 8  # 24 layers of a rank hold two microbatches, whose experts have these inputs
