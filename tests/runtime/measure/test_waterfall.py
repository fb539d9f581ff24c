"""The instrument of benchmarks/waterfall.py: drawn routing has its skew, and predictions follow from the sent rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from schedc.cell.graph import Lane
from schedc.plan.counts.link_rows import link_rows, rows_between
from support.sweeps import in_sweeps

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


@pytest.mark.slow
@pytest.mark.parametrize("rho", [1.0, 1.2, 1.6])
def test_all_layers_have_the_stated_skew(drawn: ModuleType, rho: float) -> None:
    fullest = [drawn.rank_rows(drawn.expected(layer, rho)).max() for layer in range(6)]
    assert fullest == pytest.approx([rho] * 6, rel=0.03)
    assert len({int(drawn.rank_rows(drawn.expected(layer, 1.6)).argmax()) for layer in range(12)}) > 1


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_uniform_routing_sends_the_rows_of_the_closed_form(drawn: ModuleType, method: str) -> None:
    choices = drawn.expected(0, 1.0)
    assert drawn.sent_rows(method, choices) == pytest.approx(drawn.uniform_rows(method), rel=0.02)


def test_links_carry_the_tokens_that_were_drawn(waterfall: ModuleType) -> None:
    """The compiler expects distinct tokens from numbers of rows; here each token is counted."""
    drawn = 2.0, 2, 4, 2048
    step = waterfall.STEPS[1]
    plan = waterfall.priced(*(of(step, waterfall.Times.of(1.0)) for of in (waterfall.plan_text, waterfall.cost_text)))
    record = waterfall.foreseen(*drawn).by_expert
    links = link_rows(plan.schedule.plan, map(rows_between, record[-1]))
    uniform, counted = waterfall.uniform_rows(step.method), waterfall.at_home(step.method, *drawn).sent
    for lane, even, sent in zip((Lane.RAIL, Lane.NODE), uniform, counted, strict=True):
        assert links[lane].max(axis=2).mean() * even == pytest.approx(sent, rel=0.02)
        assert sent > 1.03 * even


@pytest.mark.slow
def test_copies_shorten_a_predicted_step_where_ranks_are_uneven(
    waterfall: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waterfall, "MICROBATCHES", 4)
    times = waterfall.Times.of(1.0)
    steps = {step.what: step for step in waterfall.STEPS}
    plain, hot, even = (waterfall.predicted(steps[what], times, 1.6) for what in ("overlap", "hot", "balance"))
    assert max(hot, even) < 0.97 * plain
    assert waterfall.predicted(steps["hot"], times, 1.0) == waterfall.predicted(steps["overlap"], times, 1.0)


@in_sweeps("runtime/measure/test_emulated_device.py::test_an_emulated_step_is_the_predicted_one")
@pytest.mark.slow
@pytest.mark.processes
def test_a_step_takes_as_long_as_predicted(waterfall: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the microbatches and layers of `python benchmarks/waterfall.py`, and nodes uneven beside copies.

    Experts that took the mean rows would be 5 % faster.
    """
    halves = {"MICROBATCHES": 4, "BLOCKS": 4, "MODEL": waterfall.Model(5, 1), "START": (1, 1, 1, 2)}
    for name, value in halves.items():
        monkeypatch.setattr(waterfall, name, value)
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
