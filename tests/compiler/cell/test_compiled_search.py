"""The search for orders inside cells by loops over arrays: interpreted or compiled, the orders are the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cell import CellCosts, CellProgram, StageShape, cell_program, local_search
from schedc.cell import compiled_search as compiled
from schedc.cell.bounds import lower_bound
from schedc.cell.compiled_search import ListRuns, SearchLoops
from schedc.cell.list_scheduler import MANNERS, LaneClock, Placed, Priority
from schedc.cell.schedule import forget_programs
from schedc.cell.tasks import Tasks, tasks_of
from schedc.cli import main
from schedc.step.cells import cell_pricing
from support.cell_cases import cells, shapes_of
from support.sweeps import thinned

LOOPS = compiled.load() or SearchLoops()
WAYS = [SearchLoops(), *filter(None, [compiled.load()])]
"""Loops that are interpreted, and compiled where numba is there."""
ROOT = Path(__file__).parents[3]


def searched_by(loops: SearchLoops | None, search: Callable[[], object], tries: int = 1500) -> object:
    """What the search gives by these loops, by methods if None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_search, "loops_for", lambda tries: loops)
        patch.setattr(local_search, "TRIES_PER_TASK", tries)
        return search()


def random_starts(tasks: Tasks, duration: list[float], seed: int, loops: SearchLoops | None = None) -> list[Placed]:
    """List schedules of random priorities: far from the best, so that the search has work."""
    choose = Random(seed)
    rules = [Priority([choose.randint(0, 9) / 8 for _ in duration], *manner) for manner in MANNERS]
    if loops is None:
        return [LaneClock(tasks, duration).run(rule) for rule in rules]
    return list(map(ListRuns(tasks, duration, loops), rules))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(cells(), st.integers(0, 2**32), st.sampled_from([0.5, 1.0, 1.02]))
def test_loops_find_what_the_methods_find(
    cell: tuple[str, StageShape, StageShape, CellCosts, tuple[int, ...]], seed: int, share: float
) -> None:
    """No search reaches less than its bound, so that one with a smaller bound makes all tries."""
    kind, forward, backward, _, again = cell
    tasks = tasks_of(kind, *shapes_of(kind, forward, backward), again)
    rng = np.random.default_rng(seed)
    duration: list[float] = (rng.uniform(0, 5, len(tasks)) * (rng.random(len(tasks)) < 0.8)).tolist()
    for loops in WAYS:
        assert random_starts(tasks, duration, seed, loops) == random_starts(tasks, duration, seed)
    bound = share * lower_bound(tasks, duration)
    starts = [local_search.Tried.of(tasks, each, bound) for each in random_starts(tasks, duration, seed)]
    found = [
        searched_by(loops, lambda: local_search.improved(tasks, duration, (starts[:1], starts[1:]), bound), 60)
        for loops in (None, *WAYS)
    ]
    assert found == [found[0]] * len(found)


def test_draws_are_those_of_python() -> None:
    for seed in (0, 1, 97, 2**40):
        draws, plain = compiled._Draws(seed), Random(seed)
        for ahead, taken in ((5, 2), (700, 700), (3, 0), (1400, 9)):
            known = draws.ahead(ahead)[:taken].tolist()
            draws.take(taken)
            assert known == [plain.random() for _ in range(taken)]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "schedule"), thinned(product(("cells", "hops", "moe2"), ("dualpipev", "zbh1_overlap")), 5)
)
def test_cells_of_the_examples_have_the_programs_of_the_methods(
    costs: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[CellProgram] = []

    def noted(*arguments: object) -> CellProgram:
        found.append(cell_program(*arguments))  # type: ignore[arg-type]
        return found[-1]

    def programs() -> list[CellProgram]:
        forget_programs()
        found.clear()
        file = ROOT / "examples" / "costs" / f"{costs}.toml"
        main(["check", schedule, "-D", "P=4", "-D", "M=16", "--cost-file", str(file)], standalone_mode=False)
        forget_programs()
        return list(found)

    monkeypatch.setattr(cell_pricing, "cell_program", noted)
    by_loops = searched_by(LOOPS, programs)
    assert by_loops
    assert by_loops == searched_by(None, programs)


def test_loops_are_loaded_when_interpreted_searches_have_cost_as_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loops = SearchLoops()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_interpreted_seconds", [0.0])
    monkeypatch.setattr(compiled, "_compile_seconds", compiled._compile_seconds.__wrapped__)
    monkeypatch.setattr(compiled, "load", lambda: loops)
    clock = [0.0]
    monkeypatch.setattr(compiled, "process_time", lambda: clock[0])

    def search_for(seconds: float) -> None:
        with compiled.interpreted():
            clock[0] += seconds

    assert compiled.loops_for(10**6) is None
    search_for(0.3)
    assert compiled.loops_for(10**6) is None
    search_for(0.2)
    assert compiled.loops_for(10**6) is None, "they have to be compiled"
    kept = tmp_path / "search_loops.shorten-1.nbi"
    kept.write_bytes(b"")
    assert compiled.loops_for(10**6) is loops
    assert compiled.loops_for(10) is None
    os.utime(kept, (0, 0))
    assert compiled.loops_for(10**6) is None, "older than the source"
    with compiled.first_of(10):
        search_for(0.8)
    assert compiled.loops_for(10**6) is None, "the first of ten took 0.8 s, and those before 0.5 s"
    with compiled.first_of(2):
        search_for(0.6)
    assert compiled.loops_for(10**6) is loops
