"""Works that slow compute down: times against an exact run of events, tables of cost files, and the report."""

from __future__ import annotations

import random
from collections import deque
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.ir.works import WorkLane
from schedc.report.check import to_json, to_text
from schedc.source import Source
from schedc.step import numba_kernels, walk
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc.step.costs.lanes import LaneEngine
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks, WorkPlace
from schedc.step.timeline import durations
from schedc.step.work_runs import run_with_works
from support.random_schedules import random_schedule
from support.random_works import placed_under
from support.sweeps import swept


def items_of(dependencies: Dependencies, placed: PlacedWorks, rank: int) -> deque[tuple[str, int]]:
    """What a rank does, in order: starts and joins of works, waits for messages, and cells."""
    events, items = placed.events, deque[tuple[str, int]]()
    for cell in range(dependencies.rank_start[rank], dependencies.rank_start[rank + 1]):
        here = np.flatnonzero(events.gap == cell + rank)
        todo = [("join" if events.joins[e] else "start", int(events.work[e])) for e in here]
        late = int((events.place[here] >= WorkPlace.CAME).sum())
        items += [*todo[: len(todo) - late], ("wait", cell), *todo[len(todo) - late :], ("cell", cell)]
    return items


def ends_by_events(
    dependencies: Dependencies,
    duration: list[Fraction],
    latency: Fraction,
    placed: PlacedWorks,
    time: list[Fraction],
    slowdown: list[Fraction],
) -> list[Fraction]:
    """[cells] ends, by a clock that goes from event to event and takes the done part from all running work."""
    ranks = range(dependencies.rank_start.size - 1)
    items = [items_of(dependencies, placed, rank) for rank in ranks]
    lanes = [[deque[list[object]]() for _ in WorkLane] for _ in ranks]
    running: dict[int, list[object]] = {}
    now, end, finished = Fraction(0), {}, set()

    def arrived(cell: int) -> bool:
        wanted = zip(dependencies.producers[:, cell], dependencies.remote[:, cell], strict=True)
        return all(p < 0 or (p in end and end[p] + latency * bool(r) <= now) for p, r in wanted)

    def step(rank: int) -> bool:
        if rank in running or not items[rank]:
            return False
        what, which = items[rank][0]
        if what == "start":
            lanes[rank][placed.works.lane[which]].append([which, time[which]])
        elif what == "cell":
            running[rank] = [which, duration[which]]
        elif not (which in finished if what == "join" else arrived(which)):
            return False
        items[rank].popleft()
        return True

    while any(items) or running:
        while any(step(rank) for rank in ranks):
            pass
        pace = {r: 1 + sum(slowdown[i] for i, lane in enumerate(lanes[r]) if lane) for r in ranks}
        under_way = [end[cell] + latency - now for cell in end if end[cell] + latency > now]
        heads = [lane[0] for rank in ranks for lane in lanes[rank] if lane]
        spent = min([*under_way, *(head[1] for head in heads), *(left * pace[r] for r, (_, left) in running.items())])
        now += spent
        for head in heads:
            head[1] -= spent
        for rank in ranks:
            for lane in lanes[rank]:
                if lane and lane[0][1] == 0:
                    finished.add(lane.popleft()[0])
        for rank, cell in list(running.items()):
            cell[1] -= spent / pace[rank]
            if cell[1] == 0:
                end[running.pop(rank)[0]] = now
    return [end[cell] for cell in range(len(dependencies))]


@pytest.mark.sweep
def test_ends_are_those_of_an_exact_run_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreted loop and the compiled one, whose bits are the same."""
    rng, slowed = random.Random(45), 0
    loops = numba_kernels.load()
    for seed in range(swept(2_000, 25)):
        schedule = random_schedule(seed)
        dependencies = Dependencies.of(schedule)
        costs = Costs(F=rng.randint(1, 3), I=rng.randint(1, 3), W=rng.randint(1, 3), p2p=rng.choice((0, 0.5)))
        duration = durations(dependencies, costs.resolved(schedule.stages))
        placed = placed_under(dependencies, costs, rng.randint(1, 3), rng.choice((0.5, 1.0)), rng.randint(0, 2))
        time = np.array([rng.choice((0.25, 0.5, 1.5, 4.0)) for _ in range(len(placed))])
        slowdown = np.array([rng.choice((0.0, 0.125, 0.5, 2.0)) for _ in WorkLane])
        args = dependencies, duration, float(costs.p2p), placed, time
        lanes = run_with_works(*args, slowdown)
        exact = ends_by_events(
            dependencies, [*map(Fraction, duration.tolist())], Fraction(costs.p2p), placed,
            [*map(Fraction, time.tolist())], [*map(Fraction, slowdown.tolist())],
        )  # fmt: skip
        assert np.allclose(lanes.end, [float(end) for end in exact], rtol=1e-12, atol=0)
        undisturbed = run_with_works(*args).end
        assert (undisturbed <= lanes.end + 1e-12).all()
        slowed += bool((undisturbed < lanes.end).any())
        if seed < 3 and loops is not None:
            with monkeypatch.context() as patched:
                patched.setattr(walk, "kernels", lambda seconds: loops)
                assert np.array_equal(run_with_works(*args, slowdown).end, lanes.end)
    assert slowed > swept(2_000, 25) / 4


PLAN = """sched 1
plan a = 1f1b(P = 8, M = 32) {
  layers 8
  memory 4
  host 100 at 2
  offload auto
}
"""
LANES = """schema = "schedc.costs/1"
[lanes.d2h]
engine = "sm"
interference = {sm = 0.08, copy = 0.01}
[lanes.h2d]
engine = "sm"
interference = 0.1
"""


def costs_of(text: str) -> Costs:
    return parse_costs(Source("costs.toml", text))


def test_a_report_tells_the_gain_of_a_copy_engine(tmp_path: Path) -> None:
    (tmp_path / "a.sched").write_text(PLAN, encoding="utf-8")
    plan = f"{tmp_path / 'a.sched'}:a"
    plain, slow = to_json(analyse(plan, {})), to_json(analyse(plan, {}, costs_of(LANES)))
    assert "engines" not in plain["offload"]
    first, second = slow["offload"]["engines"]
    assert slow["makespan"] > plain["makespan"]
    assert (first["copy_measured"], second["copy_measured"]) == (True, False)
    assert 0 < first["copy_gain"] < first["slowed"]
    assert second["copy_gain"] == second["slowed"] > 0
    by_copies = LANES.replace('engine = "sm"\ninterference = {', 'engine = "copy"\ninterference = {')
    faster = to_json(analyse(plan, {}, costs_of(by_copies)))
    assert faster["makespan"] == pytest.approx(slow["makespan"] * (1 - first["copy_gain"]))
    text = to_text(slow, every_rank=False)
    assert "d2h by a kernel: compute beside it takes 8 % longer" in text
    assert "by a copy engine that slows nothing down: a step at most" in text


def test_lanes_of_a_cost_file_are_written_and_read() -> None:
    costs = costs_of(LANES)
    assert costs.lanes[0] == LaneEngine("d2h", "sm", (("copy", 0.01), ("sm", 0.08)))
    assert costs.resolved(4).slowdown[: WorkLane.H2D + 1].tolist() == [0.08, 0.1]
    assert costs_of(dump_costs(costs)) == costs
    assert dump_costs(Costs()) == dump_costs(Costs(lanes=()))


@pytest.mark.parametrize(
    ("old", "new", "code", "line", "message"),
    [
        ('"sm"\ninterference = 0.1', '"dma"\ninterference = 0.1', "S402", 6, "`lanes.h2d` has engine 'dma'"),
        ('engine = "sm"\ninterference = 0.1', "interference = 0.1", "S402", 5, "`lanes.h2d` says no engine"),
        ("= 0.1", "= -0.1", "S402", 7, "`interference` of `lanes.h2d` is -0.1"),
        ("= 0.1", "= {copy = 0.1}", "S402", 7, "has no figure for its engine `sm`"),
        ("= 0.1", "= {dma = 0.1}", "S401", 7, "`interference` has no `dma`"),
        ("interference = 0.1", "", "S402", 5, "`interference` of `lanes.h2d` is missing"),
        ("lanes.h2d", "lanes.rail", "S401", 5, "`rail` is a lane of exchanges inside cells"),
        ("lanes.h2d", "lanes.hd2", "S401", 5, "`hd2` is no lane of works"),
        ("= 0.1", "= 0.1\nspeed = 2", "S401", 8, "`lanes.h2d` has no `speed`"),
    ],
)
def test_wrong_lanes_are_said_at_their_places(old: str, new: str, code: str, line: int, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        costs_of(LANES.replace(old, new))
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.primary.span.line) == (code, line)
    assert message in finding.message
