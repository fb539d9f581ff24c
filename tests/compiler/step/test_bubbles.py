"""Classes of idle time: they sum to the bubble, and each is what its definition says; the critical path is one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step.bubbles import (
    CLASSES,
    DEPENDENCY,
    IMBALANCE,
    MESSAGE,
    OVERHEAD,
    classify,
    classify_run,
    critical_path,
)
from schedc.step.costs.costs import Costs
from schedc.step.timeline import Timeline, observed, simulate
from support.random_schedules import random_schedule

UNEVEN = st.lists(st.integers(0, 7), min_size=6, max_size=6)


def named(name: str, **sizes: int) -> Schedule:
    return elaborate(open_schedule(name), sizes)


def gap_table(timeline: Timeline, costs: Costs) -> list[tuple[int, float, float, dict[str, float]]]:
    bubbles = classify(timeline, costs)
    return [
        (int(r), float(a), float(b), {CLASSES[i]: float(part) for i, part in enumerate(parts) if part})
        for r, a, b, parts in zip(bubbles.rank, bubbles.start, bubbles.end, bubbles.parts.T, strict=True)
    ]


@settings(max_examples=60)
@given(st.integers(0, 10**6), UNEVEN, UNEVEN, st.sampled_from([0.0, 0.25, 3.0]))
def test_classes_sum_to_the_bubble(seed: int, forward: list[int], backward: list[int], p2p: float) -> None:
    schedule = random_schedule(seed)
    per_stage = slice(schedule.stages)
    costs = Costs(F=tuple(forward[per_stage]), B=tuple(backward[per_stage]), p2p=p2p)
    timeline = simulate(schedule, costs)
    bubbles = classify(timeline, costs)
    assert (bubbles.parts >= 0).all()
    np.testing.assert_allclose(bubbles.parts.sum(0), bubbles.end - bubbles.start, rtol=1e-9)
    np.testing.assert_allclose(bubbles.totals.sum(0), timeline.bubble, rtol=1e-9, atol=1e-9)
    if p2p == 0:
        assert not bubbles.totals[MESSAGE].any()


@settings(max_examples=30)
@given(st.integers(0, 10**6), UNEVEN, st.sampled_from([0.0, 0.25]))
def test_a_run_as_predicted_waits_for_producers_and_then_for_messages(
    seed: int, backward: list[int], p2p: float
) -> None:
    schedule = random_schedule(seed)
    costs = Costs(B=tuple(backward[: schedule.stages]), p2p=p2p)
    timeline = simulate(schedule, costs)
    run = observed(timeline.dependencies, timeline.start, timeline.end)
    bubbles, predicted = classify_run(run), classify(timeline, costs)
    assert bubbles.cell.tolist() == predicted.cell.tolist()
    assert (bubbles.parts >= 0).all()
    np.testing.assert_allclose(bubbles.parts.sum(0), bubbles.end - bubbles.start, rtol=1e-9)
    np.testing.assert_allclose(bubbles.totals.sum(0), run.bubble, rtol=1e-9, atol=1e-9)
    assert (bubbles.parts[OVERHEAD] <= p2p + 1e-9).all(), "nothing but messages keeps a cell of this run waiting"
    if p2p == 0:
        np.testing.assert_allclose(bubbles.totals[DEPENDENCY], predicted.totals[2:].sum(0), atol=1e-9)
        assert run.end[critical_path(run)[-1]] == run.makespan


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 5), st.integers(1, 5), st.sampled_from([0.0, 2.0]))
def test_even_stages_are_never_imbalanced_and_sums_are_exact(seed: int, f: int, w: int, p2p: float) -> None:
    costs = Costs(F=f, I=2, W=w, p2p=p2p)
    timeline = simulate(random_schedule(seed), costs)
    bubbles = classify(timeline, costs)
    assert not bubbles.totals[IMBALANCE].any()
    assert bubbles.totals.sum(0).tolist() == timeline.bubble.tolist()


def test_a_slow_stage_is_told_from_the_order() -> None:
    """GPipe on 2 ranks, F of 1 and 3: at the mean of 2 the wait of 6 between F1 and B0 on rank 0 would be 3."""
    costs = Costs(F=(1.0, 3.0), B=1.0)
    assert gap_table(simulate(named("gpipe", P=2, M=2), costs), costs) == [
        (0, 2.0, 8.0, {"dependency": 3.0, "imbalance": 3.0}),
        (1, 0.0, 1.0, {"warm-up": 1.0}),
        (1, 9.0, 10.0, {"cooldown": 1.0}),
    ]


def test_steady_waits_for_a_slow_stage_are_all_imbalance() -> None:
    """1F1B: once warm, every rank waits per microbatch for what the last one takes longer, and for nothing else."""
    even, slow = Costs(), Costs(F=(1.0, 1.0, 1.0, 2.0), B=(2.0, 2.0, 2.0, 4.0))
    schedule = named("1f1b", P=4, M=32)
    at_even, at_slow = (classify(simulate(schedule, costs), costs) for costs in (even, slow))
    waits = (at_slow.cell >= 0) & (at_slow.parts[IMBALANCE] > 0) & (at_slow.rank < 3)
    assert waits.sum() > 3 * 20
    steady = waits & (at_slow.start > 40) & (at_slow.start < 120)
    np.testing.assert_allclose(at_slow.parts[IMBALANCE, steady], (at_slow.end - at_slow.start)[steady])
    assert not at_even.totals[IMBALANCE].any()


def test_messages_are_told_from_the_order() -> None:
    """1F1B on 2 ranks: rank 0 waits for the round trip of its only microbatch; 2 of the 4 are messages."""
    costs = Costs(F=1.0, B=2.0, p2p=1.0)
    assert gap_table(simulate(named("1f1b", P=2, M=1), costs), costs) == [
        (0, 1.0, 6.0, {"dependency": 3.0, "message": 2.0}),
        (1, 0.0, 2.0, {"warm-up": 2.0}),
        (1, 5.0, 8.0, {"cooldown": 3.0}),
    ]


@pytest.mark.parametrize("p2p", [0.0, 0.5])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_the_critical_path_has_no_holes(name: str, p2p: float) -> None:
    timeline = simulate(named(name, P=4, M=20), Costs(p2p=p2p))
    path = critical_path(timeline)
    rank = timeline.dependencies.rank[path]
    flight = np.where(np.diff(rank) != 0, p2p, 0.0)
    assert timeline.start[path[0]] == 0.0
    assert timeline.end[path[-1]] == timeline.makespan
    assert (timeline.start[path[1:]] - timeline.end[path[:-1]]).tolist() == flight.tolist()


def test_rounding_leaves_no_gaps() -> None:
    costs = Costs(F=0.1, I=0.1, W=0.1)
    assert len(classify(simulate(named("gpipe", P=1, M=64), costs), costs)) == 0


def test_a_rank_without_gaps_has_no_bubble() -> None:
    costs = [Costs(F=time, I=time, W=time) for time in (0.1, 0.7, 1 / 3, 0.123)]
    alone = [simulate(named("gpipe", P=1, M=64), each) for each in costs]
    assert [(f"{each.bubble_ratio}", f"{each.span_bubble_ratio}") for each in alone] == [("0.0", "0.0")] * len(costs)
