"""Lower bounds of cells under many costs: those of a plain walk over the tasks, to the last digit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedc.cell import CellCosts, SegmentTimes, StageShape, stage_shape
from schedc.cell.bounds import OpBounds, delay_bounds, delays_of, lower_bounds
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import SliceFactor
from schedc.cell.program import MESSAGED
from schedc.cell.slices import sliced
from schedc.cell.tasks import Tasks, tasks_of
from support.cell_cases import cells, shapes_of

Cell = tuple[str, StageShape, StageShape, CellCosts, tuple[int, ...]]


def chain(tasks: Tasks, duration: Sequence[float], starts: Sequence[int], ends: Sequence[int]) -> float:
    """The longest chain from the beginning of one of ``starts`` to the end of one of ``ends``; -inf without one."""
    reached = [-math.inf] * len(tasks)
    for index, task in enumerate(tasks.all):
        before = max((reached[earlier] for earlier in task.after), default=-math.inf)
        reached[index] = duration[index] + max(before, 0.0 if index in starts else -math.inf)
    return max((reached[index] for index in ends), default=-math.inf)


def plain_bound(tasks: Tasks, duration: Sequence[float], starts: Sequence[int]) -> float:
    """The longest chain from ``starts``, or their work on a queue with the shortest chains before and behind it."""
    every = range(len(tasks))
    heads = [chain(tasks, duration, starts, [index]) for index in every]
    tails = [0.0] * len(tasks)
    for index in reversed(every):
        tails[index] = max((tails[after] + duration[after] for after in tasks.followers[index]), default=0.0)
    bound = max(heads, default=-math.inf)
    for queue in set(tasks.queues):
        own = [index for index in starts if tasks.queues[index] == queue and duration[index]]
        work = 0.0
        for index in own:
            work += duration[index]
        if own:
            before = min(heads[index] - duration[index] for index in own)
            bound = max(bound, before + work + min(tails[index] for index in own))
    return bound


def plain_delays(tasks: Tasks, duration: Sequence[float]) -> list[list[float]]:
    every = range(len(tasks))
    starts = [every, *([index for index in every if tasks.all[index].half is half] for half in MESSAGED)]
    delays = [
        [chain(tasks, duration, of, every if to is None else to) for of in starts] for to in (None, *tasks.leaving)
    ]
    for row, to in zip(delays, (None, *tasks.leaving), strict=True):
        row[0] = max(row[0], 0.0)
        if to is None:
            row[:] = [max(bound, plain_bound(tasks, duration, of)) for bound, of in zip(row, starts, strict=True)]
    return delays


@pytest.mark.slow
@given(cells(), st.integers(0, 2**32))
def test_bounds_are_those_of_a_plain_walk(cell: Cell, seed: int) -> None:
    kind, forward, backward, _, again = cell
    tasks = tasks_of(kind, *shapes_of(kind, forward, backward), again)
    rng = np.random.default_rng(seed)
    duration = rng.uniform(0, 5, (len(tasks), 4)) * (rng.random((len(tasks), 4)) < 0.7)
    bounds, delays = lower_bounds(tasks, duration), delay_bounds(tasks, duration)
    for k in range(4):
        alone = duration[:, k].tolist()
        assert bounds[k] == max(plain_bound(tasks, alone, range(len(tasks))), 0.0)
        assert delays[:, :, k].tolist() == plain_delays(tasks, alone)


def test_a_stage_of_paddings_takes_no_time() -> None:
    tasks = tasks_of("F", stage_shape([]), None)
    assert lower_bounds(tasks, np.zeros((0, 2))).tolist() == [0.0, 0.0]
    assert delay_bounds(tasks, np.zeros((0, 1)))[:, 0, 0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.slow
@given(cells(), st.integers(1, 3))
def test_durations_of_many_costs_are_those_of_each(cell: Cell, slices: int) -> None:
    kind, forward, backward, costs, again = cell
    halves = shapes_of(kind, sliced(forward, slices), sliced(backward, slices))
    tasks = tasks_of(kind, *halves, () if slices > 1 else again)
    factors = (SliceFactor(2, 1.25, 1.1),)
    both = [CellCosts(each.segments, each.exchanges, factors) for each in (costs, costs.with_rows(1.3, 0.7))]
    found = CellCostBatch.of(both).durations(tasks)
    assert found.T.tolist() == [list(tasks.durations(each, each)) for each in both]


def test_post_is_part_of_the_attention_behind_an_exchange() -> None:
    shape = stage_shape(["moe", "moe"], shared=False)
    costs = CellCosts.of({"attention": SegmentTimes(5), "post": SegmentTimes(2), "experts": SegmentTimes(3)})
    tasks = tasks_of("F", shape, None)
    times = dict(zip(shape.names, CellCostBatch.of([costs]).durations(tasks)[:, 0].tolist(), strict=True))
    assert (times["0.attention"], times["1.attention"], times["1.post"]) == (5, 7, 2)


@pytest.mark.slow
@given(cells(), st.integers(0, 2**32))
def test_bounds_of_pairs_are_those_of_their_ops(cell: Cell, seed: int) -> None:
    kind, forward, backward, *_ = cell
    graphs = shapes_of(kind, forward, backward)
    whole, own = tasks_of(kind, *graphs), [graph for graph in graphs if graph is not None]
    sides = [(graph, None) if letter == "F" else (None, graph) for letter, graph in zip(kind, own, strict=True)]
    ops = [tasks_of(letter, *side) for letter, side in zip(kind, sides, strict=True)]
    rng = np.random.default_rng(seed)
    duration = rng.uniform(0, 5, (len(whole), 3)) * (rng.random((len(whole), 3)) < 0.7)
    parts = np.split(duration, [len(ops[0])])
    bounds = delays_of(*(OpBounds.of(op, part) for op, part in zip(ops, parts[: len(ops)], strict=True)))
    np.testing.assert_allclose(bounds, delay_bounds(whole, duration), rtol=1e-12)
