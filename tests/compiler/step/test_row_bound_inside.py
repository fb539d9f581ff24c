"""The bound of all orders of unequal microbatches, where cells are priced from inside: against orders one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from schedc.compiler import analyse
from schedc.source import Source
from schedc.step.cells.cell_pricing import CellPricing
from schedc.step.cells.group_pricing import RankRows
from schedc.step.cells.row_bound_inside import row_bound_inside
from schedc.step.costs.costs import parse_costs
from schedc.step.row_order import repeat_segments
from support.sweeps import swept

CELLS = (Path(__file__).parents[3] / "examples" / "costs" / "cells.toml").read_text()
SIZES = {
    "1f1b": {"P": 4, "M": 6}, "zbh1": {"P": 3, "M": 6}, "interleaved_1f1b": {"P": 2, "M": 6},
    "dualpipe": {"P": 2, "M": 6}, "dualpipev": {"P": 3, "M": 7}, "seq1f1b": {"P": 2, "M": 4, "k": 2},
}  # fmt: skip
ROWS = {"even": "", "uneven": "\n[cell.rows]\nper_rank = [1.5, 0.5]\n", "copies": "hot = {rail = 30}"}
"""What a table of cells says of rows and copies of experts, by name."""


def priced(name: str, rows: str) -> tuple[CellPricing, int]:
    """The pricing of microbatches of factor 1, and segments of a microbatch. Some cells of `copies` send none."""
    costs = replace(parse_costs(Source("costs.toml", CELLS + ROWS[rows])), p2p=3.0)
    inside = analyse(name, SIZES[name], costs).inside
    assert inside is not None
    if rows == "copies":
        counts = np.random.default_rng(1).integers(0, 3, (64, inside.dependencies.schedule.microbatches, 2))
        shapes = (inside.kinds[0].forward or inside.kinds[0].backward,) * inside.dependencies.schedule.stages
        inside = replace(inside, ranks=RankRows(np.ones((1, 1, 2)), shapes, copies=counts.astype(float)))
    return inside, SIZES[name].get("k", 1)


def step_of(inside: CellPricing, factors: np.ndarray) -> float:
    """The step of microbatches with these factors [1 or stages, microbatches], from inside."""
    shapes = (inside.kinds[0].forward or inside.kinds[0].backward,) * inside.dependencies.schedule.stages
    ranks = inside.ranks or RankRows(np.ones((1, 1, 1)), shapes)
    return replace(inside, ranks=replace(ranks, microbatches=factors)).late_wait.makespan


PAIRS = [*product(SIZES, ROWS)]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "rows"), swept(PAIRS, PAIRS[::9]))
def test_no_order_undercuts_it(name: str, rows: str) -> None:
    inside, segments = priced(name, rows)
    assert inside.floor <= inside.late_wait.makespan
    travel = {name for name, _ in inside.costs.exchanges} - {name for name, _ in inside.least_costs.exchanges}
    assert travel == ({"hot.rail"} if rows == "copies" else set())
    count = inside.dependencies.schedule.microbatches // segments
    draws = np.random.default_rng(2)
    for kinds, spread in ((1, 3), (1, 1), (inside.dependencies.schedule.stages, 3)):
        factors = draws.random((kinds, count)) ** spread + 0.05
        bound = row_bound_inside(inside, factors, segments)
        orders = (draws.permutation(count) for _ in range(12))
        steps = [step_of(inside, repeat_segments(factors[:, order], segments)) for order in orders]
        assert min(steps) >= bound * (1 - 1e-12)
        assert kinds > 1 or bound > (0.6 if rows == "even" else 0.4) * min(steps)


@pytest.mark.parametrize("name", SIZES)
def test_equal_microbatches_nearly_reach_it(name: str) -> None:
    inside, segments = priced(name, "even")
    equal = np.ones((1, inside.dependencies.schedule.microbatches // segments))
    assert 0.95 * inside.late_wait.makespan < row_bound_inside(inside, equal, segments) <= inside.late_wait.makespan


@pytest.mark.parametrize("factors", [[5, 1, 1, 4, 1, 6, 1, 3, 2], [1, 1.1, 1, 1.1, 1.1, 1, 1]])
def test_it_is_the_work_of_the_last_rank(factors: list[float]) -> None:
    """By hand: forwards of the cheapest in front; behind, nothing, or what waits for the I of the last backward."""
    text = 'schema = "schedc.costs/1"\n[cell]\nstages = "dense"\nmethod = "flat"\ndense = {F = 2, I = 3, W = 4}\n'
    inside = analyse("1f1b", {"P": 3, "M": len(factors)}, parse_costs(Source("costs.toml", text))).inside
    assert inside is not None
    waiting = (3 + 3 + 4) * min(factors) - 4 * max(factors)
    by_hand = 2 * 2 * min(factors) + 9 * sum(factors) + max(0, waiting)
    assert row_bound_inside(inside, np.array([factors])) == pytest.approx(by_hand)
