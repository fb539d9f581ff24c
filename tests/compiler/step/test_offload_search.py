"""Tries of `offload auto` that stop early are judged as whole ones; compiled loops give what interpreted ones do."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.ir.program import EVERY_COLUMN
from schedc.ir.schedule import Schedule
from schedc.step import numba_kernels
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.program import insert_works as inserting
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import CellTimes
from schedc.step.work_runs import run_with_works
from schedc.step.works import place_offload
from schedc.step.works.offload_search import OffloadSearch
from schedc.step.works.place_offload import LaneSpeeds, stays_of
from support.needs import needed
from support.random_schedules import random_schedule, with_recomputation
from support.random_works import placed_under, random_replica_works
from support.sweeps import swept

NAMES = ("1f1b", "dualpipev", "interleaved_1f1b", "gpipe", "zbh1")


def schedule_of(seed: int, draw: random.Random) -> Schedule:
    """A random order, or one of the library, which has fewer cells that nothing waits for."""
    if seed % 2:
        return with_recomputation(random_schedule(seed), seed) if seed % 3 == 0 else random_schedule(seed)
    ranks = draw.choice((2, 4))
    return legal_schedule(open_input(draw.choice(NAMES)), {"P": ranks, "M": ranks * draw.choice((2, 3, 6))})


def search_of(schedule: Schedule, draw: random.Random) -> OffloadSearch:
    """Ranks with room for a random part of their memory."""
    costs = Costs(
        F=draw.choice((1.0, 1.3)), W=draw.choice((1.0, 0.7)), p2p=draw.choice((0, 0.1)),
        activation=draw.choice((1.0, 0.3)), recomputed=0.5,
    )  # fmt: skip
    dependencies, of_stage = Dependencies.of(schedule), costs.resolved(schedule.stages)
    cells = CellTimes.of(dependencies, of_stage)
    held = measure_memory(schedule, costs, dependencies).memory_inside
    stays = stays_of(dependencies, of_stage.activation, of_stage.recomputed)
    room = np.full(schedule.ranks, float(held.max()) * draw.uniform(0.3, 1))
    speeds = LaneSpeeds(cells.start, cells.end, draw.choice((0.05, 0.5, 1.5, 4.0)), draw.choice((0.05, 1.0, 3.0)))
    return OffloadSearch(cells, stays, speeds, held, room)


@pytest.mark.slow
@pytest.mark.sweep
def test_tries_that_are_left_lengthen_the_step_and_unchanged_ones_keep_every_time() -> None:
    rng, seen = random.Random(50), Counter[str]()
    for seed in range(swept(10_000, 80)):
        search = search_of(schedule_of(seed, rng), rng)
        cells = search.cells
        for places in range(4):
            whole = search.kept(places)
            assert whole is not None
            placed = whole.moves.placed(cells.dependencies)
            time = placed.works.bytes * np.array([search.speeds.out, search.speeds.back])[placed.works.lane]
            lanes = run_with_works(cells.dependencies, cells.duration, cells.latency, placed, time)
            makespan = float(lanes.end.max())
            assert whole.unchanged == (
                np.array_equal(lanes.start, cells.start) and np.array_equal(lanes.end, cells.end)
            )
            for limit in (cells.makespan * (1 + 1e-9), cells.makespan * 1.1):
                tried = search.kept(places, limit)
                if tried is None:
                    assert makespan > limit * (1 - 1e-12)
                    seen["left"] += 1
                else:
                    assert tried.moves.left.tolist() == whole.moves.left.tolist()
                    assert tried.moves.back.tolist() == whole.moves.back.tolist()
                    assert (tried.fits, tried.unchanged) == (whole.fits, whole.unchanged)
                    seen["longer" if makespan > limit else "unchanged" if tried.unchanged else "as short"] += 1
    assert seen["left"] > 4 * seen["longer"] > 0
    assert seen["unchanged"] > 0


@pytest.mark.slow
def test_compiled_loops_choose_and_insert_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    needed("numba")
    compiled = numba_kernels.load()
    results = []
    for loops in (None, compiled):
        monkeypatch.setattr(place_offload, "kernels", lambda seconds, loops=loops: loops)
        monkeypatch.setattr(inserting, "kernels", lambda seconds, loops=loops: loops)
        rng, result = random.Random(7), []
        for seed in range(12):
            schedule = schedule_of(seed, rng)
            search = search_of(schedule, rng)
            for places in (0, 1):
                tried = search.kept(places, search.cells.makespan)
                result += [] if tried is None else [tried.moves.left.tolist(), tried.moves.back.tolist(), tried.fits]
            dependencies, costs = search.cells.dependencies, Costs()
            placed = placed_under(dependencies, costs, rng.randint(0, 4), 1.0)
            placed = placed if seed % 3 else placed.beside(random_replica_works(dependencies, costs, rng))
            plain = insert_communication(schedule, costs, dependencies)
            program = inserting.insert_works(plain, dependencies, placed)
            result += [getattr(program, name).tolist() for name in ("rank_start", "kind", *EVERY_COLUMN)]
            assert inserting.without_works(program) == plain
        results.append(result)
    assert results[0] == results[1]
