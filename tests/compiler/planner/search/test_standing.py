"""Where a search stands while it runs, against what the search does afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.result import SearchResult
from schedc.planner.search.standing import OpenWork, SearchStanding, seconds_left
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import OfferedSchedules, PlanSpace
from schedc.planner.times.problem import PlanProblem

QWEN = PlanProblem(open_model("qwen3-30b-a3b").at(4096), open_cluster("h100", 16), 64)
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


@pytest.mark.parametrize("objective", ["step", "memory"])
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
    assert (last.best_s, seen[0][2].left_s) == (min(plan.step_s for plan in found.pareto), None)
    limited = [at for _, at in priced if at.left_s is not None]
    assert limited
    assert all(at.left_s is not None and 0 <= at.left_s < 600 for at in limited)


def test_plans_that_wait_for_their_prices_are_open() -> None:
    """Pairs that overlap have no step before they are priced from inside."""
    where = "overlap and pp == 2 and vpp == 2 and tp == 1 and cp == 1 and ep == 4 and alltoall == flat and zero == 1"
    _, seen = standings(where, SearchOptions(top=2, policy_seconds=0.0), QWEN)
    (simulated,) = [at for stage, _, at in seen if stage == "simulated"]
    assert (simulated.left_s, simulated.best_s) == (None, None)
    assert simulated.decided is not None
    assert simulated.decided < 0.5  # the rest does not fit


def test_an_exhaustive_search_decides_by_looking_and_a_front_says_no_share() -> None:
    where = "pp == 2 and tp == 1 and schedule in 1f1b, zbh1"
    found, seen = standings(where, SearchOptions(top=1, exhaustive=True))
    simulated = [(count, at) for stage, count, at in seen if stage == "simulated"]
    assert simulated[0][0] < simulated[-1][0] == found.space.fit
    assert [at.decided for _, at in simulated] == pytest.approx([count / found.space.fit for count, _ in simulated])
    assert {at.left_s for _, at in simulated} == {None}
    found, front = standings(where, SearchOptions(top=2, objective="pareto"))
    assert {at.decided for _, _, at in front} == {None}
    assert front[-1][2].best_s == pytest.approx(found.plans[0].step_s)


def test_the_time_that_is_left_is_that_of_each_kind_of_work() -> None:
    """Nothing is said of work whose pace is not known; orders by costs end with their limit."""
    none = OpenWork(0, 0, 0.0)
    assert seconds_left(OpenWork(10, 5, 1.0), OpenWork(3, 2, 4.0), none, 50.0) == pytest.approx(2.0 + 6.0)
    assert seconds_left(none, OpenWork(3, 0, 0.0), none, 50.0) is None
    assert seconds_left(none, none, OpenWork(1000, 10, 20.0), 30.0) == 30.0
    assert seconds_left(none, none, OpenWork(4, 10, 20.0), 30.0) == 8.0
    assert seconds_left(none, none, OpenWork(4, 0, 0.0), 30.0) is None
