"""The fullest rank of an expert group against drawn loads, published figures of the law, and scipy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.priced import step_seconds
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.skew import fullest_rank, lower_gamma, spread_of
from schedc.planner.times.table import RunTable
from support.needs import needed
from support.training_runs import run_of


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


@pytest.mark.parametrize("fullest", [1.01, 1.4, 3.0])
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
    assert (steps[1:, 1] > 1.02 * steps[1:, 0]).all()
