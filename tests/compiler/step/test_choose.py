"""Chosen orders: in their timelines every op starts when the choice started it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.elaborate.computed_cases import TIMES, stage_costs
from schedc.compiler import legal_schedule
from schedc.elaborate import elaborate, fastest, zero_bubble
from schedc.ir.arrays import Floats
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.search import greedy
from schedc.search.bounds import OpWindows
from schedc.search.problem import Freedom, problem_of
from schedc.search.tune import with_cell_order
from schedc.step import turn_loops
from schedc.step.choose import Cell, ChoiceRule, ChosenOrder, Ops, RankQueue, choose
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from support.sweeps import swept


@dataclass
class Noting:
    """A rule that notes when each op starts, in the unit of the ops."""

    rule: Any
    starts: dict[int, float] = field(default_factory=dict)

    def queue(self, rank: int, ops: Ops, due: Sequence[float]) -> RankQueue:
        return _NotingQueue(self.rule.queue(rank, ops, due), self.starts)


@dataclass
class _NotingQueue:
    inner: RankQueue
    starts: dict[int, float]

    def take(self, now: float) -> Cell | None:
        cell = self.inner.take(now)
        self.starts |= dict.fromkeys(cell or (), now)
        return cell


@contextmanager
def noted(module: Any) -> Iterator[list[tuple[ChosenOrder, Noting]]]:
    """The orders that a module chooses, each with the starts of its ops."""
    choices: list[tuple[ChosenOrder, Noting]] = []

    def noting(ops: Ops, rule: ChoiceRule) -> ChosenOrder:
        note = Noting(rule)
        choices.append((choose(ops, note), note))
        return choices[-1][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose", noting)
        yield choices


def walked(order: ChosenOrder, schedule: Schedule, costs: Costs) -> Floats:
    """[ops] when each op of a schedule starts, by the timeline of an order of its ops."""
    dependencies = Dependencies.of(order.of(schedule))
    by_rank = np.argsort(schedule.rank[order.rows], kind="stable")
    starts = np.empty(len(schedule))
    starts[order.rows[by_rank]] = simulate(order.of(schedule), costs, dependencies).start[dependencies.cell_of]
    return starts


@settings(max_examples=swept(30, 12))
@given(st.data(), st.sampled_from(["adaptive_pipe", "zb_greedy"]), st.integers(1, 4), st.integers(1, 3))
def test_ops_of_policies_start_when_the_choice_said(data: st.DataObject, name: str, P: int, rounds: int) -> None:
    tree, sizes = open_schedule(name), {"P": P, "M": P * rounds}
    costs = data.draw(stage_costs(legal_schedule(tree, sizes).stages))
    with noted(fastest) as choices:
        elaborate(tree, sizes, costs)
    for order, note in choices:
        starts = walked(order, note.rule.schedule, costs)
        assert dict(enumerate(starts.tolist())) == note.starts
    assert choices


@settings(max_examples=swept(30, 12))
@given(stage_costs(4), st.integers(4, 8), st.integers(1, 9))
def test_the_zero_bubble_search_ends_when_it_said(costs: Costs, limit: int, M: int) -> None:
    complete: list[zero_bubble._Ranks] = []
    run = zero_bubble._Ranks.run

    def noting(ranks: zero_bubble._Ranks, switches: zero_bubble.Switches) -> bool:
        complete.extend([ranks] * run(ranks, switches))
        return ranks in complete

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_bubble._Ranks, "run", noting)
        patch.setattr(fastest, "_runs", lambda _: None)  # leaves out the fixed order
        schedule = elaborate(open_schedule("zb_auto"), {"P": 4, "M": M, "limit": limit}, costs)
    timeline, said = simulate(schedule, costs), min(complete, key=lambda ranks: ranks.span)
    assert (timeline.makespan, timeline.span.max()) == (max(said.free), said.span)


@pytest.mark.parametrize("name", ["vhalf", "vmin"])
def test_filled_orders_end_when_the_choice_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[turn_loops.TurnState] = []
    run = turn_loops.run_in_turn

    def noting(ops: turn_loops.TurnOps, state: turn_loops.TurnState) -> None:
        said.append(state)
        run(ops, state)

    monkeypatch.setattr(turn_loops, "_compiled", lambda: None)
    monkeypatch.setattr(turn_loops, "run_in_turn", noting)
    for sizes in ({"P": 1, "M": 1}, {"P": 3, "M": 2}, {"P": 6, "M": 18}):
        timeline = simulate(elaborate(open_schedule(name), sizes))
        assert sorted(timeline.end.tolist()) == sorted(said.pop().end[:-2])


@settings(max_examples=swept(30, 12))
@given(st.data(), st.sampled_from(["1f1b", "zbv", "dualpipev"]), st.booleans(), st.booleans())
def test_list_schedules_start_when_the_choice_said(data: st.DataObject, name: str, split: bool, capped: bool) -> None:
    seed = legal_schedule(open_schedule(name), {"P": 2, "M": 4})
    F, inputs, weights, latency = (data.draw(TIMES) for _ in range(4))
    costs = Costs(F=F, I=inputs, W=weights, p2p=latency)
    caps = measure_memory(seed, costs).peak_memory if capped else None
    problem = problem_of(seed, costs, caps, Freedom(split=split))
    windows = OpWindows(problem)
    with noted(greedy) as choices:
        found = list(greedy.list_orders(windows, list(range(len(problem)))))
    complete = [(order, note) for order, note in choices if order.rows.size == len(problem)]
    assert len(found) == len(complete) > 0
    for order, note in complete:
        cells = order.rows[np.argsort(problem.dependencies.rank[order.rows], kind="stable")].tolist()
        starts = simulate(with_cell_order(problem, order.rows.tolist()), costs).start * problem.time.ticks
        assert starts.tolist() == [note.starts[cell] for cell in cells]


def test_promises_let_begun_microbatches_end() -> None:
    seed, costs = legal_schedule(open_schedule("interleaved_1f1b"), {"P": 4, "M": 8, "v": 4}), Costs()
    problem = problem_of(seed, costs, np.full(4, 8.0), Freedom())
    with noted(greedy) as choices:
        list(greedy.list_orders(OpWindows(problem), list(range(len(problem)))))
    ended = {kept: [order.rows.size == len(problem) for order, note in choices if any(note.rule.promises) == kept]
             for kept in (True, False)}  # fmt: skip
    assert all(ended[True])
    assert not all(ended[False])
