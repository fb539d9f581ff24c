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


@pytest.fixture
def drawn(waterfall: ModuleType) -> ModuleType:
    """The module that draws the routing."""
    return sys.modules["drawn_routing"]


@pytest.mark.parametrize("rho", [1.0, 1.2, 1.6])
def test_all_layers_have_the_stated_skew(drawn: ModuleType, rho: float) -> None:
    fullest = [drawn.rank_rows(drawn.expected(layer, rho)).max() for layer in range(6)]
    assert fullest == pytest.approx([rho] * 6, rel=0.03)
    assert len({int(drawn.rank_rows(drawn.expected(layer, 1.6)).argmax()) for layer in range(12)}) > 1


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_uniform_routing_sends_the_rows_of_the_closed_form(drawn: ModuleType, method: str) -> None:
    choices = drawn.expected(0, 1.0)
    sent = drawn.sent_rows(method, choices, drawn.computing_ranks(choices))
    assert sent == pytest.approx(drawn.uniform_rows(method), rel=0.02)


def test_lent_experts_take_rows_from_the_fullest_rank(waterfall: ModuleType, drawn: ModuleType) -> None:
    times, step = waterfall.Times.of(1.0), waterfall.STEPS[3]
    choices = drawn.expected(0, 1.6)
    hot = waterfall.hot_of(drawn.expert_rows(choices), step, times)
    assert hot
    assert drawn.rank_rows(choices, hot).max() < drawn.rank_rows(choices).max()
    assert drawn.rank_rows(choices, hot).mean() == pytest.approx(1.0)
    sent = [drawn.sent_rows("flat", choices, drawn.computing_ranks(choices, each)).rail for each in (hot, ())]
    assert sent[0] < sent[1]
    assert waterfall.hot_of(drawn.expert_rows(drawn.expected(0, 1.0)), step, times) == ()


def test_copies_even_the_ranks_of_each_node(waterfall: ModuleType) -> None:
    """Nodes keep the rows that the router gave them, and rows of other nodes are as many."""
    plain, even = (waterfall.foreseen("hierarchical", 1.6, 2, 4, 256, even=each) for each in (False, True))
    inside, before = (rows.factors.reshape(2, 4, 2, 2) for rows in (even, plain))
    np.testing.assert_allclose(inside.sum(3), before.sum(3))
    uneven = [np.ptp(each, axis=3).mean() for each in (inside, before)]
    assert uneven[0] < 0.05 < 0.3 < uneven[1]
    assert even.sent.rail == plain.sent.rail
    assert 0.5 < even.sent.node / plain.sent.node < 1.1
    assert even.recorded.digest == plain.recorded.digest


@pytest.mark.slow
@pytest.mark.processes
def test_a_step_takes_as_long_as_predicted(waterfall: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the microbatches of `python benchmarks/waterfall.py`, and nodes that stay uneven beside copies.

    Experts that took the mean rows would be 5 % faster.
    """
    monkeypatch.setattr(waterfall, "MICROBATCHES", 4)
    skew = waterfall.Skew(1.6, 1.1)
    step = waterfall.Step("even", "hierarchical", overlap=True, copies=waterfall.EVEN, dealt=True)
    waterfall.pool(waterfall.PIPELINE * waterfall.RANKS).run("support.short_search:on_rank")
    run = waterfall.measured(step, waterfall.Times.of(skew.delta), skew, 1)
    predicted = waterfall.predicted(step, waterfall.waited(step, skew.delta), skew.rho)
    assert run["seconds"] == pytest.approx(predicted, rel=0.02)
    assert run["lent"] > 0
    assert 1.1 < run["fullest"] < skew.rho


def test_rows_have_the_stated_squares_until_they_are_dealt(waterfall: ModuleType) -> None:
    given, dealt = (waterfall.squares_of(each, 1.25, 8) for each in (False, True))
    assert given.mean(axis=1).max() == pytest.approx(1.25)
    assert given.mean() == pytest.approx(1.0)
    assert sorted(dealt.ravel().tolist()) == pytest.approx(sorted(given.ravel().tolist()), rel=1e-6)
    assert dealt.max(axis=0).mean() == pytest.approx(1.0)  # each position has rows of one kind
    attention = [waterfall.Times.of(delta).segments["attention"] for delta in (1.0, 1.25)]
    growth = [1 + slope * 0.25 for slope in waterfall.slopes_of_attention()]
    assert [attention[0][half] * growth[half] for half in range(3)] == pytest.approx(list(attention[1]))
