"""Questions about a makespan: the answers are those of the solver's own search, and the orders are what they say."""

from __future__ import annotations

import random
from threading import Event
from typing import Any

import numpy as np
import pytest

from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.ir.ops import OpKind
from schedc.search import tune as tuning
from schedc.search.asking import ask, close_gap, worth_asking
from schedc.search.bounds import OpWindows
from schedc.search.problem import Freedom, SearchProblem, problem_of
from schedc.search.questions import TickModel, TickQuestion
from schedc.search.rank_windows import RankWindows
from schedc.search.solver import Effort, solve
from schedc.search.tune import start_times
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory
from support.needs import needed
from support.random_schedules import random_schedule
from support.sweeps import in_sweeps

cp_model = needed("ortools.sat.python.cp_model")

QUICK = Effort(None, 5.0, workers=1)
BRIEF = Effort(None, 0.05, workers=1)


def library(name: str, cap: float, costs: Costs | None = None, **sizes: int) -> SearchProblem:
    seed = legal_schedule(open_input(name), sizes)
    return problem_of(seed, costs or Costs(), np.full(seed.ranks, cap), Freedom())


def random_problem(number: int) -> SearchProblem:
    """A small problem with times, messages and memory of its own; pairs are kept or not, backwards are split or not."""
    seed, draw = random_schedule(number), random.Random(number)

    def some(*values: float) -> tuple[float, ...]:
        return tuple(draw.choice(values) for _ in range(seed.stages))

    alike = draw.random() < 0.5
    costs = Costs(F=some(1, 2), I=some(1, 2), W=1 if alike else some(1, 2), FB=draw.choice([None, 3]),
                  p2p=draw.choice([0, 0, 1]), activation=1 if alike else some(1, 2),
                  pending_weight=draw.choice([1, 0.5, 0]) if alike else some(1, 0.5))  # fmt: skip
    freedom = Freedom(keep_pairs=draw.random() < 0.5, split=draw.random() < 0.7)
    caps = measure_memory(seed, costs).peak_memory * draw.choice([1.0, 1.3])
    return problem_of(seed, costs, caps, freedom)


@pytest.mark.slow
def test_models_allow_every_order_and_no_shorter_one() -> None:
    """The solver's best order solves the model of its makespan. No answer is shorter, and all are possible."""
    proved = answered = 0
    for number in range(18):
        problem = random_problem(number)
        windows = OpWindows(problem)
        known = solve(windows, "makespan", 0, None, Effort(None, 0.1, workers=1))
        if known.start is None:
            continue
        best, tight = int((known.start + problem.duration).max()), RankWindows(windows)
        assert int((tight.head + problem.duration + tight.tail).max()) <= best
        assert allows(TickQuestion(tight, best), known.start)
        answer = ask(TickQuestion(tight, best), BRIEF, Event())
        assert answer.status != "infeasible"
        if answer.start is not None:
            answered += 1
            assert_possible(problem, answer.start, best)
        if known.status == "optimal":
            proved += 1
            assert ask(TickQuestion(tight, best - 1), BRIEF, Event()).status != "optimal"
    assert (proved >= 8, answered >= 8) == (True, True)


def allows(question: TickQuestion, start: Any) -> bool:
    """Whether the model has a solution in which all cells but exchangeable weight gradients start so."""
    ours = TickModel.of(question)
    for place in np.flatnonzero(~question.weight).tolist():
        ours.model.add(ours.by(place, start[place]) == 1)
        ours.model.add(ours.by(place, start[place] - 1) == 0)
    return bool(cp_model.CpSolver().solve(ours.model) == cp_model.OPTIMAL)


def assert_possible(problem: SearchProblem, start: Any, makespan: int) -> None:
    """Cells start behind what they need, one after another on a rank, within the memory, and end in time."""
    before, after, lag = problem.before, problem.after, problem.lag
    assert (start[after] >= start[before] + problem.duration[before] + lag).all()
    order = np.argsort(start, kind="stable").tolist()
    assert (start_times(problem, order) <= start).all()
    assert int((start + problem.duration).max()) <= makespan
    for rank in range(problem.schedule.ranks):
        cells = np.flatnonzero(problem.dependencies.rank == rank)
        cells = cells[np.argsort(start[cells])]
        assert (start[cells][1:] >= (start + problem.duration)[cells][:-1]).all()
        if problem.capacity is not None:
            holds = problem.holds
            taken = start[holds.taken] + problem.duration[holds.taken] * holds.late
            until = (start + problem.duration)[holds.freed]
            own = problem.dependencies.rank[holds.taken] == rank
            for tick in taken[own].tolist():
                held = own & (taken <= tick) & (tick < until)
                assert holds.amount[held].sum() <= problem.capacity[rank]


def test_heads_count_what_a_rank_runs_before_a_cell() -> None:
    """The last of four microbatches on the first of two stages: its W follows eleven cells, and its F three."""
    problem = library("gpipe", 4, Costs(), P=2, M=4)
    schedule, head = problem.schedule, RankWindows(OpWindows(problem)).head
    last = np.flatnonzero((schedule.stage == 0) & (schedule.microbatch == 3))
    assert {OpKind(int(schedule.kind[row])).name: int(head[row]) for row in last} == {"F": 3, "B": 13}


@in_sweeps("test_models_allow_every_order_and_no_shorter_one")
@pytest.mark.slow
def test_the_gap_of_vmin_at_5_ranks_closes_at_its_floor() -> None:
    """The published order takes 75."""
    problem = library("vmin", 6, P=5, M=10)
    windows = OpWindows(problem)
    assert worth_asking(RankWindows(windows), 71)
    result = close_gap(RankWindows(windows), 71, 75, Effort(120.0, workers=2))
    assert (result.status, result.bound) == ("optimal", 71)
    assert result.start is not None
    assert_possible(problem, result.start, 71)


def test_what_is_refuted_raises_the_bound() -> None:
    problem = library("zbh1", 2, P=2, M=4)
    windows = OpWindows(problem)
    known = solve(windows, "makespan", 0, None, QUICK)
    result = close_gap(RankWindows(windows), known.bound - 3, known.bound, QUICK)
    assert (result.status, result.start, result.bound) == ("optimal", None, known.bound)


def test_nothing_is_asked_about_small_or_large_problems() -> None:
    small, fine = library("zbv", 4, P=2, M=4), library("vmin", 8, Costs(p2p=0.01), P=8, M=16)
    assert not worth_asking(RankWindows(OpWindows(small)), 30)
    assert not worth_asking(RankWindows(OpWindows(fine)), 12_000)


@pytest.mark.slow
def test_tune_asks_where_list_schedules_found_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "search_side_by_side", lambda *_: None)
    monkeypatch.setattr(tuning, "solve", None)
    seed = legal_schedule(open_input("vmin"), {"P": 5, "M": 10})
    tuned = tuning.tune(seed, Costs(), caps=np.full(5, 6.0), effort=Effort(None, 10.0, workers=1))
    assert (tuned.best.value, tuned.proven, tuned.origin) == (71.0, True, "search")
