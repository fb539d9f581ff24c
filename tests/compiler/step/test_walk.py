"""The walk: the compiled loop, numpy level by level and the interpreted loop give the same bits of any table."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from schedc.cell import stage_shape
from schedc.diagnostics import CompilerBug
from schedc.elaborate import elaborate
from schedc.ir.arrays import Floats, Int32
from schedc.load.library import open_schedule
from schedc.step import lowering, numba_kernels, walk
from schedc.step.cells.cell_pricing import price
from schedc.step.cells.group_pricing import RankRows
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.numba_kernels import MEET, PACE
from schedc.step.placed_works import TimedWorks
from schedc.step.timeline import run_durations
from schedc.step.walk import Walk, run
from support.cell_cases import reference_costs
from support.random_works import placed_under

LOOPS = numba_kernels.load() or (lambda loop: loop)


def random_walk(rng: np.random.Generator, meet: bool) -> Walk:
    """Instructions of one input to three, some of them the same input twice, and some outputs that nobody reads."""
    size = int(rng.integers(1, 60))
    op = np.where(rng.random(size) < 0.3 * meet, MEET, 0).astype(np.int8)
    count = np.where(op == MEET, 1, rng.integers(1, 4, size))
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    source = np.concatenate([rng.integers(max(-1, i - 6), i, n) for i, n in enumerate(count.tolist())]).astype(np.int32)
    add = np.where(op == MEET, rng.integers(0, 3, size), rng.integers(-1, 5, size)).astype(np.int32)
    lag = np.where(np.repeat(op, count) == MEET, 0, rng.integers(0, 4, source.size)).astype(np.int32)
    return Walk(op, first, source, lag, add)


def by_definition(table: Walk, lags: Floats, adds: Floats, sets: Int32) -> Floats:
    value = np.zeros((len(table) + 1, adds.shape[1]))
    for i in range(len(table)):
        inputs = range(table.first[i], table.first[i + 1])
        latest = np.max([value[table.source[j]] + lags[table.lag[j]] for j in inputs], axis=0)
        if table.op[i] == MEET:
            groups = sets[table.add[i]]
            value[i] = [value[table.source[inputs[0]]][groups == group].max() for group in groups]
        else:
            value[i] = latest + adds[table.add[i]] if table.add[i] >= 0 else latest
    return value[:-1]


@pytest.mark.parametrize("seed", range(40))
def test_all_ways_give_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    meet, K = seed % 4 == 0, 300 if seed % 5 == 0 else 5  # more than run at a time
    table, adds = random_walk(rng, meet), rng.uniform(0, 3, (5, K))
    lags, sets = np.concatenate([np.zeros((1, K)), rng.uniform(0, 1, (3, K))]), rng.integers(0, 3, (3, K), np.int32)
    expected = by_definition(table, lags, adds, sets)
    watch = rng.permutation(len(table))[:7]
    for loops in (None, LOOPS):
        monkeypatch.setattr(walk, "kernels", lambda _seconds, loops=loops: loops)
        fresh = Walk(table.op, table.first, table.source, table.lag, table.add)
        more = {"sets": sets} if meet else {}
        assert run(fresh, lags, adds, **more).tobytes() == expected.tobytes()
        assert run(fresh, lags, adds, watch=watch, **more).tobytes() == expected[watch].tobytes()
        if not meet:
            assert run(fresh, lags[:, :1], adds[:, :1])[:, 0].tobytes() == expected[:, 0].tobytes()


def test_integers_of_any_size_are_exact() -> None:
    cells = Dependencies.of(elaborate(open_schedule("1f1b"), {"P": 3, "M": 4}))
    big = 10**49 + 7
    start, end = run_durations(cells, np.array([big] * len(cells), object), 3)
    _, small = run_durations(cells, np.array([1] * len(cells), object), 0)
    assert (start[0], end[0]) == (0, big)
    assert max(end) % big % 3 == 0
    assert max(end) // big == max(small)


def test_works_slow_cells_down_under_one_cost_alone() -> None:
    table = Walk(np.array([PACE], np.int8), np.array([0, 1]), *np.array([[-1], [0], [0]], np.int32))
    with pytest.raises(CompilerBug, match="under many costs"):
        run(table, np.zeros((1, 2)), np.ones((1, 2)))


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_works_beside_a_group_of_equal_ranks_are_those_beside_one(name: str) -> None:
    cells = Dependencies.of(elaborate(open_schedule(name), {"P": 4, "M": 10}))
    placed = placed_under(cells, Costs(p2p=0.25), 2.0, 1.0)
    works = TimedWorks(placed, np.random.default_rng(3).uniform(1, 90, len(placed)))
    shapes = [stage_shape(["moe"])] * cells.schedule.stages
    alone = price(cells, shapes, reference_costs(12), 3.0, works=works)
    group = price(cells, shapes, reference_costs(12), 3.0, group=RankRows(np.ones((1, 1, 3)), shapes), works=works)
    assert alone.works is not None
    assert group.works is not None
    assert alone.works.exposed.sum() > 0
    assert np.allclose(alone.works.exposed, group.works.exposed)
    assert alone.late_wait.makespan == pytest.approx(group.late_wait.makespan)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_a_loop_lowers_closed_cells_as_their_form_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, ways = elaborate(open_schedule(name), {"P": 4, "M": 12}), []
    for loops in (None, LOOPS):
        monkeypatch.setattr(lowering, "kernels", lambda _seconds, loops=loops: loops)
        ways.append(lowering.closed_cells(Dependencies.of(schedule)))
    (by_form, end), (by_loop, other) = ways
    assert np.array_equal(end, other)
    for field in fields(by_form):
        one, same = getattr(by_form, field.name), getattr(by_loop, field.name)
        assert (one.dtype, one.tolist()) == (same.dtype, same.tolist()), field.name
