"""Where a search stands while it runs, against what the search does afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.search import best_first
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.result import SearchResult
from schedc.planner.search.standing import OpenPlans, Pace, SearchStanding, SecondsLeft, seconds_left
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import OfferedSchedules, PlanSpace
from schedc.planner.times.problem import PlanProblem
from support.short_search import short_search
from support.sweeps import halved

QWEN = PlanProblem(replace(open_model("qwen3-30b-a3b"), layers=8).at(4096), open_cluster("h100", 16), 64)
GPT2 = PlanProblem(open_model("gpt2").at(1024), open_cluster("h100", 8), 32)


def standings(
    condition: str, options: SearchOptions, problem: PlanProblem = GPT2
) -> tuple[SearchResult, list[tuple[str, int, SearchStanding]]]:
    model, wanted = problem.model, [read_condition(condition)]
    space = PlanSpace.of(model, problem.cluster, problem.sequences, model.seq, "standard", wanted, OFFERED)
    seen: list[tuple[str, int, SearchStanding]] = []

    def progress(stage: str, count: int, standing: Callable[[], SearchStanding] | None = None) -> None:
        assert (standing is None) == (stage == "bounded")
        if standing is not None:
            seen.append((stage, count, standing()))

    return search(space, problem, options, progress), seen


OFFERED = OfferedSchedules(None)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("objective", halved(["step", "memory"]))
def test_no_plan_that_was_decided_is_priced_later(objective: str) -> None:
    """Plans of fixed orders and orders by costs: the open ones are as many as are priced afterwards, or more.

    Plans of the answer are priced at last, for their files, where the search needed no price of them.
    """
    found, seen = standings("pp >= 2 and tp == 1", SearchOptions(top=5, objective=objective))
    among, priced = found.space.fit, [(count, at) for stage, count, at in seen if stage == "priced"]
    shares = [at.decided for _, at in priced]
    assert shares == sorted(shares, key=lambda share: -1.0 if share is None else share)
    for count, at in priced:
        assert at.decided is not None
        assert round((1 - at.decided) * among) >= found.counts.priced - count - len(found.plans)
    last = priced[-1][1]
    assert last.decided == pytest.approx(1.0, abs=1.5 / among)
    assert last.best_s == min(plan.step_s for plan in found.pareto)
    limited = [at.left for _, at in priced if at.left is not None]
    assert limited
    assert all(0 <= least <= most for least, most in limited)


@pytest.mark.slow
@short_search()
def test_plans_that_wait_for_their_prices_are_open() -> None:
    """Pairs that overlap have no step before they are priced from inside."""
    where = "overlap and pp == 2 and vpp == 2 and tp == 1 and cp == 1 and ep == 4 and alltoall == flat and zero == 1"
    _, seen = standings(where, SearchOptions(top=2, policy_seconds=0.0), QWEN)
    (simulated,) = [at for stage, _, at in seen if stage == "simulated"]
    assert (simulated.left, simulated.best_s) == (None, None)
    assert simulated.decided is not None
    assert simulated.decided < 0.5  # the rest does not fit


def test_an_exhaustive_search_decides_by_looking_and_a_front_says_no_share() -> None:
    where = "pp == 2 and tp == 1 and schedule in 1f1b, zbh1"
    found, seen = standings(where, SearchOptions(top=1, exhaustive=True))
    simulated = [(count, at) for stage, count, at in seen if stage == "simulated"]
    assert simulated[0][0] < simulated[-1][0] == found.space.fit
    assert [at.decided for _, at in simulated] == pytest.approx([count / found.space.fit for count, _ in simulated])
    assert {at.left for _, at in simulated} == {None}
    found, front = standings(where, SearchOptions(top=2, objective="pareto"))
    assert {at.decided for _, _, at in front} == {None}
    assert front[-1][2].best_s == pytest.approx(found.plans[0].step_s)


def test_the_time_that_is_left_is_that_of_each_kind_of_work() -> None:
    """Nothing is said of work whose pace is not known; orders by costs end with their limit."""
    even, none = Pace(), (0, 0)
    for _ in range(3):
        even.add(2, 1.0)
    pace = {"simulated": even, "priced": even, "ordered": Pace()}
    assert seconds_left(OpenPlans((4, 10), none, none), pace, 50.0) == pytest.approx((2.0, 5.0))
    assert seconds_left(OpenPlans((4, 10), (1, 2), none), pace, 50.0) == pytest.approx((2.5, 6.0))
    assert seconds_left(OpenPlans(none, none, (2, 3)), pace, 30.0) == pytest.approx((0.0, 30.0))
    assert seconds_left(OpenPlans(none, none, (2, 300)), pace | {"ordered": even}, 30.0) == pytest.approx((1.0, 30.5))
    assert seconds_left(OpenPlans(none, (0, 1), none), pace | {"priced": Pace()}, 50.0) is None
    assert SecondsLeft(2.0, 5.0).within(3.0) == (2.0, 3.0)
    assert SecondsLeft(2.0, 5.0).within(1.0).times(2.0) == (2.0, 2.0)


def test_a_pace_that_varies_leaves_a_range() -> None:
    pace = Pace()
    assert pace.left(0, 0) == (0.0, 0.0)
    pace.add(0, 0.5)  # a closer bound, before its plan is priced
    pace.add(1, 0.5)
    assert pace.left(1, 1) is None  # one plan says no spread
    pace.add(1, 3.0)
    least, most = pace.left(8, 16) or (0.0, 0.0)
    wide = 2 * (2.0 * (16 + 16**2 / 2)) ** 0.5  # variance 2 of a plan, and of the mean of two
    assert (pace.plans, pace.seconds, most) == (2, 4.0, pytest.approx(32.0 + wide))
    assert least == max(0.0, 16.0 - 2 * (2.0 * (8 + 8**2 / 2)) ** 0.5)


@pytest.mark.slow
@short_search()
def test_the_rest_of_a_search_takes_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which each plan that is simulated, priced or ordered takes a second, each range holds the rest."""
    clock, sizes = [0.0], {"simulate_plans": len, "price_plan": lambda _: 1}
    for name, size in sizes.items():
        monkeypatch.setattr(best_first, name, _taking(clock, getattr(best_first, name), size))
    monkeypatch.setattr(best_first.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(best_first.time, "perf_counter", lambda: clock[0])
    where = (
        "pp == 2 and tp == 1 and cp == 1 and zero == 1 and ep == 4 and microbatch == 2"
        " and recompute in (full, layer, none) and schedule in 1f1b_overlap, interleaved_overlap, dualpipev, zbv"
    )
    said: list[tuple[float, SecondsLeft]] = []

    def progress(_stage: str, _count: int, standing: Callable[[], SearchStanding] | None = None) -> None:
        if standing is not None and (left := standing().left) is not None:
            said.append((clock[0], left))

    space = PlanSpace.of(QWEN.model, QWEN.cluster, 64, 4096, "standard", [read_condition(where)], OFFERED)
    search(space, QWEN, SearchOptions(top=10), progress)
    assert all(left.least <= clock[0] - at <= left.most for at, left in said)
    assert any(left.least > 0 for _, left in said)
    assert any(left.most == clock[0] - at > 1 for at, left in said)


def _taking(clock: list[float], work: Callable[..., Any], size: Callable[[Any], int]) -> Callable[..., Any]:
    """The same work, which takes a second for each plan."""

    def timed(*arguments: Any) -> Any:
        clock[0] += size(arguments[0])
        return work(*arguments)

    return timed
