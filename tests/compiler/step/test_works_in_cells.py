"""Works beside cells that are priced from inside: against cells that are closed, and against a walk by hand."""

from __future__ import annotations

import numpy as np
import pytest

from schedc.cell.delays import closed_delays
from schedc.elaborate import elaborate
from schedc.ir.arrays import Floats
from schedc.ir.works import WorkKind, WorkLane
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.messages import simulate_messages
from schedc.step.placed_works import PlacedWorks, TimedWorks
from schedc.step.timeline import durations
from schedc.step.work_runs import run_with_works
from support.random_works import placed_under

CASES = [("1f1b", {"P": 4, "M": 9}), ("zbh1", {"P": 4, "M": 8}), ("dualpipev", {"P": 4, "M": 10})]


def case(name: str, sizes: dict[str, int], latency: float) -> tuple[Dependencies, Costs, TimedWorks]:
    dependencies, costs = Dependencies.of(elaborate(open_schedule(name), sizes)), Costs(p2p=latency)
    placed = placed_under(dependencies, costs, 2.0, 1.0)
    assert len(placed) > 8
    return dependencies, costs, TimedWorks(placed, np.random.default_rng(3).uniform(0.5, 3.0, len(placed)))


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_closed_cells_are_those_of_the_timeline(name: str, sizes: dict[str, int]) -> None:
    dependencies, costs, works = case(name, sizes, 0.25)
    duration = durations(dependencies, costs.resolved(dependencies.schedule.stages))
    closed = np.array([closed_delays(time) for time in duration.tolist()]).reshape(-1, 3, 3)
    timeline, lanes = simulate_messages(dependencies, np.arange(len(duration)), duration, closed, 0.25, works)
    assert lanes is not None
    times = run_with_works(dependencies, duration, 0.25, works.placed, works.time)
    assert np.array_equal(timeline.end, times.end)
    assert np.array_equal(lanes[0], times.begin)
    assert np.array_equal(lanes[1], times.finish)
    assert timeline.makespan == times.closed.max()
    assert times.exposed.sum() > 0


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_cells_that_send_early_and_wait_late(name: str, sizes: dict[str, int]) -> None:
    dependencies, _, works = case(name, sizes, 0.0)
    rng = np.random.default_rng(5)
    delay = np.sort(rng.uniform(0.2, 2.0, (len(dependencies), 3, 3)), axis=1)[:, ::-1]
    delay = np.ascontiguousarray(np.maximum(delay, delay[:, :1] * 0.1))
    each = np.arange(len(delay))
    timeline, lanes = simulate_messages(dependencies, each, delay[:, 0].max(axis=1), delay, 0.5, works)
    assert lanes is not None
    ends, exposed = by_hand(dependencies, delay, 0.5, works)
    assert timeline.end.tolist() == pytest.approx(ends.tolist(), abs=1e-12)
    assert lanes[2].tolist() == pytest.approx(exposed.tolist(), abs=1e-12)
    assert exposed.sum() > 0


def by_hand(dependencies: Dependencies, delay: Floats, latency: float, works: TimedWorks) -> tuple[Floats, Floats]:
    """Ends of cells, and exposed times of works: cell by cell, with a list of events for each gap."""
    placed, cells = works.placed, len(dependencies)
    events: dict[int, list[tuple[int, bool, int]]] = {}
    for work in range(len(placed)):
        events.setdefault(int(placed.start[work]), []).append((int(placed.start_place[work]), False, work))
        events.setdefault(int(placed.join[work]), []).append((int(placed.join_place[work]), True, work))
    there = np.zeros((3, cells + 1))
    free, finish, exposed = (
        np.zeros((dependencies.rank_start.size - 1, len(WorkLane))),
        np.zeros(len(placed)),
        np.zeros(len(placed)),
    )
    for cell in dependencies.levels.order.tolist():
        rank = int(dependencies.rank[cell])
        now = there[0, dependencies.previous[cell]] if dependencies.previous[cell] >= 0 else 0.0
        for _, joins, work in sorted(events.get(cell + rank, [])):
            lane = placed.works.lane[work]
            if joins:
                exposed[work] = max(0.0, finish[work] - now)
                now = max(now, finish[work])
            else:
                finish[work] = free[rank, lane] = max(now, free[rank, lane]) + works.time[work]
        arrival = [now]
        for row in range(2):
            producer = int(dependencies.producers[row, cell])
            late = latency * bool(dependencies.remote[row, cell])
            arrival.append(there[1 + row, producer] + late if producer >= 0 else late)
        for out in range(3):
            there[out, cell] = max(delay[cell, out, way] + arrival[way] for way in range(3))
        if dependencies.sends_activation[cell]:
            there[2, cell] = max(there[1:, cell])
    return there[0, :-1], exposed


def test_what_stands_behind_the_last_cell_is_joined() -> None:
    dependencies = Dependencies.of(elaborate(open_schedule("1f1b"), {"P": 2, "M": 2}))
    gap = dependencies.rank_start[1:] + np.arange(2)
    kinds, minus = np.full(2, WorkKind.SNAPSHOT, np.int8), np.full(2, -1, np.int32)
    start = dependencies.rank_start[:-1] + np.arange(2)
    placed = PlacedWorks.of(kinds, np.arange(2, dtype=np.int32), minus, np.ones(2), start, gap)
    works = TimedWorks(placed, np.array([100.0, 1.0]))
    closed = np.array(closed_delays(1.0)).reshape(1, 3, 3)
    step = simulate_messages(dependencies, np.zeros(len(dependencies), np.int64), np.ones(1), closed, 0.0, works)
    assert step.works is not None
    assert (step.timeline.makespan, step.works[2][1]) == (100.0, 0.0)
