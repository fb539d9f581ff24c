"""Deadlock: found exactly where execution gets stuck, and shown as the shortest circle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from compiler.step.timeline_cases import slow_ends
from schedc.diagnostics import CompilerBug
from schedc.ir.placement import linear, loop
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.deadlock import find_cycle
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.timeline import simulate
from support import orders
from support.sweeps import swept


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(150, 60))
@given(orders.orders(legal=False))
def test_a_deadlock_is_found_exactly_where_execution_gets_stuck(schedule: Schedule) -> None:
    stuck = slow_ends(schedule, Costs()) is None
    assert [d.code for d in check_schedule(schedule)] == ["S301"] * stuck
    assert stuck != rendezvous_run_completes(schedule)
    cycle = find_cycle(Dependencies.of(schedule))
    for step, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        needed = schedule.op(step.needs)
        assert str(needed) in orders._needs(str(schedule.op(step.at)), schedule.placement)
        assert needed.rank == following.rank
        assert following.at <= step.needs  # that rank stands at or before the op that is waited for


def rendezvous_run_completes(schedule: Schedule) -> bool:
    """Runs messages as a Program does: tagless channels, sends complete when received, one global order of messages.

    The global order is that of the levels, continued by the cells that can never run. Every step may be taken at any
    time without changing what becomes possible (no receive is a wildcard), so that one run decides.
    """
    known = Dependencies.of(schedule)
    reached = known.levels.order.tolist()
    order = reached + sorted(set(range(len(known))) - set(reached))
    messages = [  # producer cell, consumer cell, in the global order of producers
        (producer, consumer)
        for producer in order
        for row in (0, 1)
        for consumer in np.flatnonzero(known.producers[row] == producer).tolist()
        if known.remote[row, consumer]
    ]
    head, posted, arrived = known.rank_start[:-1].tolist(), {}, set()
    progress = True
    while progress:
        progress = False
        for rank in range(schedule.ranks):
            if head[rank] == known.rank_start[rank + 1]:
                continue
            cell = head[rank]
            needed = [i for i, (_, consumer) in enumerate(messages) if consumer == cell]
            for i, (producer, consumer) in enumerate(messages):  # post receives up to the last one needed
                if needed and i <= needed[-1] and known.rank[consumer] == rank:
                    posted.setdefault((int(known.rank[producer]), rank, "receive"), {})[i] = None
            for channel in {(int(known.rank[messages[i][0]]), rank) for i in needed}:
                sends = list(posted.get((*channel, "send"), {}))
                receives = list(posted[(*channel, "receive")])
                assert sends == receives[: len(sends)] or receives == sends[: len(receives)], "swapped on a channel"
                arrived |= set(sends) & set(receives)
            if set(needed) <= arrived:
                head[rank] += 1
                progress = True
                for i, (producer, consumer) in enumerate(messages):
                    if producer == cell:
                        posted.setdefault((rank, int(known.rank[consumer]), "send"), {})[i] = None
    return all(h == stop for h, stop in zip(head, known.rank_start[1:].tolist(), strict=True))


def test_the_trail_of_a_deadlock_shows_each_wait_with_its_place() -> None:
    schedule = orders.schedule(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], linear(2, 2))
    (found,) = check_schedule(schedule)
    assert found.position == ("S301", 1, 5)
    assert [label.span.line for label in found.secondary] == [2]
    assert found.notes == (
        "rank 0 at 0B0 (line 1:5) waits for 1B0 of rank 1 (line 2:13)",
        "<- rank 1 at 1F1 (line 2:1) waits for 0F1 of rank 0 (line 1:9)",
        "<- rank 0, at P = 2, M = 2",
    )


def test_the_shortest_cycle_is_shown() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 and it for rank 1: rank 0 is no part of the circle."""
    lines = ["0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1", "2F1 2B1 2F0 2B0"]
    assert find_cycle(Dependencies.of(orders.schedule(["0F0 0F1 0B0 0B1", *lines[1:]], linear(3, 2)))) == ()
    cycle = find_cycle(Dependencies.of(orders.schedule([lines[0], "1F0 1B0 1F1 1B1", lines[2]], linear(3, 2))))
    assert [wait.rank for wait in cycle] == [1, 2]


def test_a_circle_through_three_ranks() -> None:
    lines = [
        "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1",  # stands at 3F0 for 2F0 of rank 2
        "1F0 4F0 1F1 4F1 4B0 4B1 1B0 1B1",  # stands at 4F0 for 3F0 of rank 0
        "2F1 2F0 5F1 5F0 5B0 5B1 2B0 2B1",  # stands at 2F1 for 1F1 of rank 1
    ]
    cycle = find_cycle(Dependencies.of(orders.schedule(lines, loop(3, 2, 2))))
    assert [wait.rank for wait in cycle] == [0, 2, 1]


def test_a_circle_between_two_pipes() -> None:
    schedule = orders.schedule(["0F0 0B0 1F1 1B1", "0F1 0B1 1F0 1B0"], orders.two_pipes(2, 2))
    assert [wait.rank for wait in find_cycle(Dependencies.of(schedule))] == [0, 1]


def test_a_deadlock_has_no_timeline() -> None:
    schedule = orders.schedule(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], linear(2, 2))
    with pytest.raises(CompilerBug, match="deadlock"):
        simulate(schedule)
