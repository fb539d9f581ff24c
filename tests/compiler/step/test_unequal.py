"""Microbatches of unequal cost: times of cells by hand, and the search for their order in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from schedc.diagnostics import CompilerBug, DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.ops import OpKind
from schedc.load.library import open_schedule
from schedc.step import walk
from schedc.step.batch import simulate_batch
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.row_order import MicrobatchPricer, order_microbatches
from schedc.step.timeline import run_durations, simulate

NAMES = ("1f1b", "zbh1", "dualpipev", "interleaved_1f1b", "zbv", "chimera", "dualpipe", "seq1f1b")
COSTS = Costs(F=2.0, I=3.0, W=1.0, FB=5.0, p2p=0.25)


def known(name: str, **sizes: int) -> Dependencies:
    return Dependencies.of(elaborate(open_schedule(name), sizes or {"P": 4, "M": 16}))


def rows(count: int, seed: int = 0) -> list[int]:
    """Costs of microbatches: one in four is four times as long as the others are at most."""
    raw = np.random.default_rng(seed)
    return [int(each) for each in np.where(raw.random(count) < 0.25, 8_000, raw.integers(1_000, 2_000, count))]


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


def test_orders_by_costs_of_stages() -> None:
    pricer = MicrobatchPricer.of(known("1f1b"), Costs())
    given = np.array(rows(16, seed=6))
    assert (order_microbatches(np.tile(given, (4, 1)), pricer) == order_microbatches(given, pricer)).all()
    for count in (0, 1):
        one = known("1f1b", P=2, M=1)
        assert order_microbatches(np.array([count]), MicrobatchPricer.of(one, Costs())).tolist() == [0]
    with pytest.raises(CompilerBug):
        order_microbatches(given[1:], pricer)
