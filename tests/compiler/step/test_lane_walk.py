"""Works beside cells that are priced from inside: against cells that are closed, and against a walk by hand."""

from __future__ import annotations

import numpy as np
import pytest

from schedc.cell.delays import closed_delays
from schedc.elaborate import elaborate
from schedc.ir.arrays import Floats
from schedc.ir.works import WorkKind, WorkLane
from schedc.load.library import open_schedule
from schedc.step.cells.cell_pricing import simulate_messages
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.lane_walk import LaneWalk, TimedWorks
from schedc.step.placed_works import PlacedWorks, run_with_works
from schedc.step.timeline import durations
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
    walk = LaneWalk(dependencies, works)
    closed = np.array([closed_delays(time) for time in duration.tolist()]).reshape(-1, 3, 3)
    timeline = simulate_messages(dependencies, duration, closed, 0.25, walk)
    times = run_with_works(dependencies, duration, 0.25, works.placed, works.time)
    assert np.array_equal(timeline.end, times.end)
    assert np.array_equal(walk.begin[:, 0], times.begin)
    assert np.array_equal(walk.finish[:, 0], times.finish)
    assert timeline.makespan == times.closed.max()
    assert times.exposed.sum() > 0


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_cells_that_send_early_and_wait_late(name: str, sizes: dict[str, int]) -> None:
    dependencies, _, works = case(name, sizes, 0.0)
    rng = np.random.default_rng(5)
    delay = np.sort(rng.uniform(0.2, 2.0, (len(dependencies), 3, 3)), axis=1)[:, ::-1]
    delay = np.ascontiguousarray(np.maximum(delay, delay[:, :1] * 0.1))
    walk = LaneWalk(dependencies, works)
    timeline = simulate_messages(dependencies, delay[:, 0].max(axis=1), delay, 0.5, walk)
    ends, exposed = by_hand(dependencies, delay, 0.5, works)
    assert timeline.end.tolist() == pytest.approx(ends.tolist(), abs=1e-12)
    assert walk.exposed[:, 0].tolist() == pytest.approx(exposed.tolist(), abs=1e-12)
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


def test_members_of_a_group_have_clocks_of_their_own() -> None:
    dependencies, _, works = case("1f1b", {"P": 4, "M": 9}, 0.0)
    walk = LaneWalk(dependencies, works, 2)
    alone = [LaneWalk(dependencies, works) for _ in range(2)]
    ready = np.random.default_rng(1).uniform(0, 9, (len(dependencies), 2))
    for rank in range(4):
        for cell in range(int(dependencies.rank_start[rank]), int(dependencies.rank_start[rank + 1])):
            both = walk.reach(np.array([cell]), ready[[cell]])
            each = [one.reach(np.array([cell]), ready[[cell], at, None]) for at, one in enumerate(alone)]
            assert np.array_equal(both, np.concatenate(each, axis=1))


def test_what_stands_behind_the_last_cell_is_joined() -> None:
    dependencies = Dependencies.of(elaborate(open_schedule("1f1b"), {"P": 2, "M": 2}))
    gap = dependencies.rank_start[1:] + np.arange(2)
    kinds, minus = np.full(2, WorkKind.SNAPSHOT, np.int8), np.full(2, -1, np.int32)
    start = dependencies.rank_start[:-1] + np.arange(2)
    placed = PlacedWorks.of(kinds, np.arange(2, dtype=np.int32), minus, np.ones(2), start, gap)
    walk = LaneWalk(dependencies, TimedWorks(placed, np.array([100.0, 1.0])))
    closed = np.array([closed_delays(1.0)] * len(dependencies)).reshape(-1, 3, 3)
    assert simulate_messages(dependencies, np.ones(len(dependencies)), closed, 0.0, walk).makespan == 100.0
    assert walk.exposed[1, 0] == 0.0
