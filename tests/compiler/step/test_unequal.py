"""Microbatches of unequal cost: times of cells by hand, and the search for their order in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from compiler.step.unequal_cases import known, rows
from schedc.diagnostics import CompilerBug, DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.ops import OpKind
from schedc.load.library import open_schedule
from schedc.plan.price_cells import price_cells
from schedc.search.problem import SEQUENCE, Freedom, problem_of
from schedc.source import Source
from schedc.step import walk
from schedc.step.batch import simulate_batch
from schedc.step.choose import Ops
from schedc.step.costs.costs import Costs, load_costs
from schedc.step.dependencies import Dependencies
from schedc.step.op_times import OpTimes
from schedc.step.row_bound import least_work, row_bound
from schedc.step.row_order import MicrobatchPricer, order_microbatches, whole_costs
from schedc.step.timeline import durations, run_durations, simulate
from schedc.step.unequal import CellParts
from schedc.syntax.parser import parse
from support.paths import ROOT

SEARCHED = """sched 1
schedule searched(P: ranks = 4, M: microbatches = 12) {
  place linear
  rank r { policy by span search within 8 keep 100 of 100 { repeat M { F }  repeat M { I }  repeat M { W } } }
}
"""
NAMES = ("1f1b", "zbh1", "dualpipev", "interleaved_1f1b", "zbv", "chimera", "dualpipe", "seq1f1b")
COSTS = Costs(F=2.0, I=3.0, W=1.0, FB=5.0, p2p=0.25)


def by_hand(dependencies: Dependencies, costs: Costs, factor: Any) -> list[float]:
    """[cells] times of cells op by op. factor: gives that of a stage and a microbatch."""
    schedule, times, FB = dependencies.schedule, [], costs.FB
    of = {OpKind.F: costs.F, OpKind.I: costs.I, OpKind.W: costs.W, OpKind.B: costs.I + costs.W}  # type: ignore[operator]
    for first, second in zip(dependencies.first.tolist(), dependencies.second.tolist(), strict=True):
        ops = [schedule.op(row) for row in (first, second) if row >= 0]
        alone = [of[op.kind] for op in ops]
        factors = [factor(op.stage, op.microbatch) for op in ops]
        total = sum(time * each for time, each in zip(alone, factors, strict=True))  # type: ignore[operator]
        if len(ops) == 2 and ops[1].kind in (OpKind.B, OpKind.I) and FB is not None:
            together = FB if ops[1].kind is OpKind.B else max(FB - costs.W, *alone)  # type: ignore
            total -= min(factors) * (sum(alone) - together)  # type: ignore
        times.append(total)
    return times


@pytest.mark.parametrize("name", NAMES)
def test_simulates_one_duration_per_cell(name: str) -> None:
    dependencies = known(name)
    factors = [row / 1000 for row in rows(dependencies.schedule.microbatches)]
    for costs in (COSTS, Costs(p2p=0.5)):
        expected = by_hand(dependencies, costs, lambda _, microbatch: factors[microbatch])
        _, end = run_durations(dependencies, np.array(expected), costs.p2p)
        unequal = Costs(costs.F, costs.I, costs.W, FB=costs.FB, p2p=costs.p2p, microbatches=tuple(factors))
        timeline = simulate(dependencies.schedule, unequal, dependencies)
        assert timeline.end == pytest.approx(end, rel=1e-12)
        assert timeline.busy.sum() == pytest.approx(sum(expected))


def test_multiplies_by_stage() -> None:
    dependencies = known("dualpipev")
    table = np.random.default_rng(1).random((dependencies.schedule.stages, 16)) + 0.5
    unequal = Costs(2.0, 3.0, 1.0, FB=5.0, p2p=0.25, microbatches=tuple(map(tuple, table.tolist())))
    expected = by_hand(dependencies, unequal, lambda stage, microbatch: table[stage, microbatch])
    _, end = run_durations(dependencies, np.array(expected), 0.25)
    assert simulate(dependencies.schedule, unequal, dependencies).makespan == pytest.approx(end.max())


def test_keeps_the_bits_of_equal_microbatches_and_of_batches() -> None:
    dependencies = known("dualpipev")
    alike, unequal = (
        Costs(1.1, 1.3, 0.7, FB=2.3, microbatches=row) for row in (16 * (1.0,), tuple(map(float, range(16))))
    )
    plain = simulate(dependencies.schedule, Costs(1.1, 1.3, 0.7, FB=2.3), dependencies)
    assert (simulate(dependencies.schedule, alike, dependencies).end == plain.end).all()
    outcomes = simulate_batch(dependencies, [alike, unequal, Costs()])
    for column, costs in enumerate((alike, unequal, Costs())):
        one = simulate(dependencies.schedule, costs, dependencies)
        assert outcomes.makespan[column] == one.makespan
        assert (outcomes.span[:, column] == one.span).all()
        assert outcomes.busy[:, column] == pytest.approx(one.busy)


@pytest.mark.parametrize(
    ("factors", "code"),
    [
        ((1.0,) * 15, "S412"),
        ((1.0,) * 15 + (-1.0,), "S412"),
        ((1.0,) * 15 + (float("nan"),), "S412"),
        ((1.0,) * 15 + (float("inf"),), "S412"),
        (((1.0,) * 16, (1.0,) * 15), "S412"),
        (((1.0,) * 16,) * 3, "S404"),
    ],
)
def test_refuses_factors(factors: Any, code: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        simulate(known("1f1b").schedule, Costs(microbatches=factors))
    assert [each.code for each in error.value.diagnostics] == [code]


# The order.


@pytest.mark.parametrize("name", NAMES)
def test_orders_for_a_shorter_step(name: str) -> None:
    dependencies = known(name)
    segments = 2 if name == "seq1f1b" else 1
    pricer = MicrobatchPricer.of(dependencies, COSTS, segments)
    given = np.array(rows(pricer.microbatches, seed=3))
    order = order_microbatches(given, pricer)
    assert sorted(order.tolist()) == list(range(pricer.microbatches))

    def step(costs: Sequence[int]) -> float:
        factors = tuple(float(each) / float(given.mean()) for each in costs for _ in range(segments))
        unequal = Costs(2.0, 3.0, 1.0, FB=5.0, p2p=0.25, microbatches=factors)
        return simulate(dependencies.schedule, unequal, dependencies).makespan

    before, after = step(given.tolist()), step(given[order].tolist())
    assert after < before
    whole = pricer.makespans(np.stack([given, given[order]])[:, None])
    assert whole[1] / whole[0] == pytest.approx(after / before, rel=1e-3)


def test_more_tries_never_lengthen_the_step() -> None:
    pricer = MicrobatchPricer.of(known("zbh1"), Costs())
    given = np.array(rows(16, seed=4))
    tried = [order_microbatches(given, pricer, tries) for tries in (0, 48, 480, 4_800)]
    steps = pricer.makespans(given[np.stack(tried)][:, None]).tolist()
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]
    turns, first = MicrobatchPricer.of(known("chimera"), Costs()), np.arange(16)
    assert order_microbatches(first, turns, 0)[[0, 8, 7, 15]].tolist() == [0, 2, 3, 1]  # two microbatches begin at once
    ends, middle = given[tried[0]][[0, -1]], given[tried[0]][7:9]
    assert sorted(ends) == sorted(given.tolist())[:2]
    assert sorted(middle) == sorted(given.tolist())[-2:]


def test_finds_the_same_order_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled loops and numpy, costs in another unit, and costs of more than 16 bits give one order, kept here."""
    given = np.array([8000, 1301, 1700, 8000, 1100, 1930, 1250, 1610, 8000, 1420, 1015, 1888])
    kept = [6, 9, 10, 5, 11, 3, 0, 8, 7, 2, 1, 4]
    for loops in (True, False):
        if not loops:
            monkeypatch.setattr(walk, "kernels", lambda seconds: None)
        pricer = MicrobatchPricer.of(known("dualpipev", P=3, M=12), COSTS)
        for costs in (given, given.astype(np.int32)):
            assert order_microbatches(costs, pricer, 480).tolist() == kept
        assert order_microbatches(given << 30, pricer, 480).tolist() == kept


def test_the_dearest_microbatch_has_all_bits_of_a_cost() -> None:
    assert whole_costs(np.array([[0.0, 1.0], [3.0, 2.0]])).tolist() == [[0, 0xFFFF // 3], [0xFFFF, 0xFFFF * 2 // 3]]


def test_orders_by_costs_of_stages() -> None:
    pricer = MicrobatchPricer.of(known("1f1b"), Costs())
    given = np.array(rows(16, seed=6))
    assert (order_microbatches(np.tile(given, (4, 1)), pricer) == order_microbatches(given, pricer)).all()
    for count in (0, 1):
        one = known("1f1b", P=2, M=1)
        assert order_microbatches(np.array([count]), MicrobatchPricer.of(one, Costs())).tolist() == [0]
    with pytest.raises(CompilerBug):
        order_microbatches(given[1:], pricer)


@pytest.mark.parametrize("costs", [COSTS, Costs(p2p=0.5)], ids=["joint", "apart"])
@pytest.mark.parametrize("name", NAMES)
def test_no_order_undercuts_the_bound(name: str, costs: Costs) -> None:
    dependencies = known(name, P=4, M=8)
    stage_costs = costs.resolved(dependencies.schedule.stages)
    parts, segments = CellParts.of(dependencies, stage_costs), 2 if name == "seq1f1b" else 1
    count = dependencies.schedule.microbatches // segments
    draws = np.random.default_rng(7)
    for kinds in (1, dependencies.schedule.stages):
        factors = draws.random((kinds, count)) ** 3 + 0.05
        bound = row_bound(parts, stage_costs.p2p, factors, segments)
        steps = []
        for _ in range(60):
            factors = factors[:, draws.permutation(count)]
            times = parts.times(np.repeat(factors, segments, axis=1))
            steps.append(run_durations(dependencies, times, stage_costs.p2p)[1].max())
        assert min(steps) >= bound * (1 - 1e-12)
        assert kinds > 1 or bound > 0.6 * min(steps)


def test_the_bound_holds_where_a_pair_is_shorter_than_an_op() -> None:
    dependencies = known("dualpipev", P=2, M=4)
    parts = CellParts.of(dependencies, Costs(F=7.0, I=2.0, W=7.0, FB=1.0).resolved(4))
    factors = np.array([[3.5, 1.6, 2.3, 0.8]])
    steps = [
        run_durations(dependencies, parts.times(factors[:, list(order)]), 0.0)[1].max()
        for order in permutations(range(4))
    ]
    assert row_bound(parts, 0.0, factors) <= min(steps)


@pytest.mark.parametrize(("name", "microbatches"), [("dualpipev", 5), ("dualpipe", 4)])
def test_no_order_gives_a_rank_less_work(name: str, microbatches: int) -> None:
    """All orders, one by one. Pairs save the most where microbatches of the largest factors are in most of them."""
    dependencies = known(name, P=2, M=microbatches)
    parts = CellParts.of(dependencies, Costs(F=2.0, I=2.0, W=1.0, FB=3.0).resolved(dependencies.schedule.stages))
    factors = np.array([[9.0, 9.0, 1.0, 1.0, 1.0][:microbatches]])
    ranks = np.repeat(np.arange(2), np.diff(dependencies.rank_start))
    orders = map(list, permutations(range(microbatches)))
    works = np.min([np.bincount(ranks, parts.times(factors[:, order])) for order in orders], axis=0)
    least = least_work(parts, factors)
    assert (least <= works).all()
    assert (least > 0.8 * works).all()


def test_the_bound_of_one_dear_microbatch_is_its_best_place() -> None:
    dependencies = known("zbh1", P=3, M=5)
    parts = CellParts.of(dependencies, Costs().resolved(3))
    places = [np.where(np.arange(5) == place, 9.0, 1.0)[None] for place in range(5)]
    steps = [run_durations(dependencies, parts.times(factors), 0.0)[1].max() for factors in places]
    assert row_bound(parts, 0.0, places[0]) == min(steps) < max(steps)


def test_the_bound_is_that_of_the_last_rank_in_1f1b() -> None:
    """By hand: M (F + B) of all microbatches, and P - 1 forwards and backwards of the cheapest one around them."""
    dependencies = known("1f1b")
    factors = np.array([rows(16, seed=8)]) / 1000
    bound = row_bound(CellParts.of(dependencies, Costs().resolved(4)), 0.0, factors)
    assert bound == pytest.approx(3 * factors.sum() + 3 * 3 * factors.min())
    equal = row_bound(CellParts.of(dependencies, Costs().resolved(4)), 0.0, np.ones((1, 16)))
    assert equal == simulate(dependencies.schedule, Costs(), dependencies).makespan


# Cells, policies, searches.


def test_cells_are_played_with_the_factors_of_both_halves() -> None:
    costs, M = load_costs(ROOT / "examples/costs/cells.toml"), 8
    for name in ("1f1b", "dualpipev"):
        plain, alike, double = (
            price_cells(known(name, P=4, M=M), replace(costs, microbatches=row)) for row in ((), M * (1.0,), M * (2.0,))
        )
        assert plain and alike and double  # noqa: PT018
        for way in ("serial", "overlapped", "early_send", "late_wait"):
            makespans = [getattr(each, way).makespan for each in (plain, alike, double)]
            assert makespans == [makespans[0], makespans[0], 2 * makespans[0]]
        assert (plain.floor, plain.communication(), plain.idle) == (alike.floor, alike.communication(), alike.idle)
        assert alike.group is None
        row = tuple(0.5 + (5 * m % 8) / 8 for m in range(M))
        unequal = price_cells(known(name, P=4, M=M), replace(costs, microbatches=row))
        assert unequal
        duration = unequal.overlapped.end - unequal.overlapped.start
        lone = np.flatnonzero(~plain.dependencies.pairs)
        microbatch = plain.dependencies.schedule.microbatch[plain.dependencies.first[lone]]
        first = (plain.overlapped.end - plain.overlapped.start)[lone]
        assert duration[lone] == pytest.approx(first * np.array(row)[microbatch])
        assert unequal.floor <= unequal.late_wait.makespan
        assert unequal.floor == pytest.approx(0.5 * plain.floor)  # no latency: all times follow the factor
        before, after = (each.serial.end - each.serial.start for each in (plain, unequal))
        known_cells, schedule = plain.dependencies, plain.dependencies.schedule
        alone = {
            int(schedule.kind[known_cells.first[cell]]): before[cell] for cell in lone
        }  # all stages have one block
        for cell in np.flatnonzero(known_cells.pairs)[:4]:
            ops = [schedule.op(int(rows_of[cell])) for rows_of in (known_cells.first, known_cells.second)]
            assert row[ops[0].microbatch] != row[ops[1].microbatch]
            assert after[cell] == pytest.approx(sum(row[op.microbatch] * alone[op.kind] for op in ops))


def test_rules_and_searches_know_the_time_of_each_op() -> None:
    schedule, factors = known("dualpipev").schedule, tuple(0.5 + m / 8 for m in range(16))
    costs = Costs(2.0, 3.0, 1.0, FB=5.0, microbatches=factors)
    ops = Ops.of(schedule, OpTimes.of(costs, schedule))
    dependencies = Dependencies.of(schedule)
    cells = [
        (int(a),) if b < 0 else (int(a), int(b)) for a, b in zip(dependencies.first, dependencies.second, strict=True)
    ]
    assert [ops.time(cell) for cell in cells] == pytest.approx(durations(dependencies, costs.resolved(8)).tolist())
    searched = parse(Source("searched.sched", SEARCHED)).schedules[0]
    factors = tuple(each / 2_000 for each in rows(12, seed=9))
    spans = []
    for chosen in (Costs(), Costs(microbatches=factors)):
        order = elaborate(searched, {"P": 4, "M": 12}, chosen)
        spans.append(simulate(order, Costs(microbatches=factors)).span.max())
    assert spans[1] < spans[0]


def test_policies_choose_by_factors() -> None:
    """A rank waits less for a large microbatch where the order is chosen for it."""
    factors = tuple(each / 2_000 for each in rows(12, seed=9))
    for name in ("zb_greedy", "zb_auto"):
        steps = []
        for chosen in (Costs(), Costs(microbatches=factors)):
            schedule = elaborate(open_schedule(name), {"P": 4, "M": 12}, chosen)
            steps.append(simulate(schedule, Costs(microbatches=factors)).makespan)
        assert steps[1] < steps[0]


def test_a_search_keeps_the_sequence_and_says_so() -> None:
    schedule = known("zbh1", P=2, M=4).schedule
    for factors, kept in (((), False), ((1.0, 2.0, 1.0, 1.0), True)):
        problem = problem_of(schedule, Costs(microbatches=factors), None, Freedom())
        assert (SEQUENCE in problem.limits) == kept
        assert problem.duration.max() == problem.duration.min() * (2 if kept else 1)
