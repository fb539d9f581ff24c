"""The instrument of benchmarks/waterfall.py: drawn routing has its skew, and predictions follow from what it sends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def waterfall() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        import waterfall  # type: ignore[import-not-found]

        yield waterfall
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("rho", [1.0, 1.2, 1.6])
def test_all_layers_have_the_stated_skew(waterfall: ModuleType, rho: float) -> None:
    fullest = [waterfall.rank_rows(waterfall.expected(layer, rho)).max() for layer in range(6)]
    assert fullest == pytest.approx([rho] * 6, rel=0.03)
    assert len({int(waterfall.rank_rows(waterfall.expected(layer, 1.6)).argmax()) for layer in range(12)}) > 1


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_uniform_routing_sends_the_rows_of_the_closed_form(waterfall: ModuleType, method: str) -> None:
    sent = waterfall.sent_rows(method, waterfall.expected(0, 1.0))
    assert sent == pytest.approx(waterfall.uniform_rows(method), rel=0.02)


def test_lent_experts_take_rows_from_the_fullest_rank(waterfall: ModuleType) -> None:
    times, step = waterfall.Times.of(1.0), waterfall.STEPS[3]
    choices = waterfall.expected(0, 1.6)
    hot = waterfall.hot_of(choices, step, times)
    assert hot
    assert waterfall.rank_rows(choices, hot).max() < waterfall.rank_rows(choices).max()
    assert waterfall.rank_rows(choices, hot).mean() == pytest.approx(1.0)
    assert waterfall.sent_rows("flat", choices, hot).rail < waterfall.sent_rows("flat", choices).rail
    assert waterfall.hot_of(waterfall.expected(0, 1.0), step, times) == ()


@pytest.mark.slow
def test_each_step_is_predicted_to_be_shorter(waterfall: ModuleType) -> None:
    seconds = [waterfall.predicted(step, waterfall.waited(step, 1.1), 1.5) for step in waterfall.STEPS]
    assert (np.diff(seconds) < 0).all()
    even = waterfall.predicted(waterfall.STEPS[0], waterfall.Times.of(1.1), 1.0)
    assert even < seconds[0]


@pytest.mark.slow
@pytest.mark.processes
def test_a_step_takes_as_long_as_predicted(waterfall: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the microbatches of `python benchmarks/waterfall.py`."""
    monkeypatch.setattr(waterfall, "MICROBATCHES", 4)
    skew, step = waterfall.Skew(1.4, 1.1), waterfall.STEPS[-1]
    waterfall.pool(waterfall.PIPELINE * waterfall.RANKS).run("support.short_search:on_rank")
    run = waterfall.measured(step, waterfall.Times.of(skew.delta), skew, 1)
    predicted = waterfall.predicted(step, waterfall.waited(step, skew.delta), skew.rho)
    assert run["seconds"] == pytest.approx(predicted, rel=0.04)
    assert run["lent"] > 0
    assert 1 <= run["fullest"] < skew.rho


def test_rows_have_the_stated_squares_until_they_are_dealt(waterfall: ModuleType) -> None:
    given, dealt = (waterfall.squares_of(each, 1.25, 8) for each in (False, True))
    assert given.mean(axis=1).max() == pytest.approx(1.25)
    assert given.mean() == pytest.approx(1.0)
    assert sorted(dealt.ravel().tolist()) == pytest.approx(sorted(given.ravel().tolist()), rel=1e-6)
    assert dealt.max(axis=0).mean() == pytest.approx(1.0)  # each position has rows of one kind
    attention = [waterfall.Times.of(delta).segments["attention"] for delta in (1.0, 1.25)]
    growth = [1 + slope * 0.25 for slope in waterfall.slopes_of_attention()]
    assert [attention[0][half] * growth[half] for half in range(3)] == pytest.approx(list(attention[1]))
