"""Closed forms of dispatches, capacities and levels, against counting, and what `auto` chooses by them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedc.ir.plan import Plan
from schedc.plan import (
    ExpertSizes,
    Level,
    Topology,
)
from schedc.plan.counts.layers import counted_layer, held_share, moe_layer
from schedc.step.costs.exchange import (
    MARGIN,
    METHODS,
    Routing,
    arrivals,
    capacity_rows,
    choose_method,
    hot_break_even,
    rows,
    time,
    untouched,
)


@pytest.mark.parametrize(
    ("nodes", "top", "count", "flat", "dedup", "allgather"),
    [(2, 8, 256, 4.0, 1.0, 1), (4, 8, 256, 6.0, 2.71, 3), (8, 8, 256, 7.0, 4.63, 7), (16, 8, 256, 7.5, 6.12, 15),
     (4, 2, 64, 1.5, 1.32, 3)],
)  # fmt: skip
def test_the_published_table_of_copies(
    nodes: int, top: int, count: int, flat: float, dedup: float, allgather: float
) -> None:
    moved = [rows(method, Routing(count, top), Topology(nodes, 4)) for method in ("flat", "hierarchical", "allgather")]
    assert [round(row.rail, 2) for row in moved if row] == [flat, dedup, allgather]


def enumerated(routing: Routing, parts: int) -> float:
    """The probability that no expert of a token is in the first part, over every draw that there is."""
    held, draws = routing.experts // parts, list(combinations(range(routing.experts), routing.top))
    return sum(min(draw) >= held for draw in draws) / len(draws)


@pytest.mark.parametrize("parts", [1, 2, 4, 6, 12])
@pytest.mark.parametrize(("groups", "limit"), [(1, 1), (4, 4), (12, 5)])
def test_missed_parts_are_those_of_every_draw(groups: int, limit: int, parts: int) -> None:
    """The best experts of the best groups are the best of all where a group is one expert."""
    routing = Routing(12, 3, groups, limit)
    assert untouched(routing, parts) == pytest.approx(enumerated(routing, parts))


@pytest.mark.parametrize("parts", [1, 2, 4, 6, 12])
def test_the_only_group_of_a_token_is_any_of_them(parts: int) -> None:
    """By hand: three of the four experts of one of three groups; of four parts the inner two lie in two groups."""
    touched = {1: 1, 2: 2 / 3, 4: (2 * 1 / 3 + 2 * (1 / 3 + 1 / 3 * 3 / 4)) / 4, 6: 1 / 3, 12: 1 / 4}
    assert 1 - untouched(Routing(12, 3, 3, 1), parts) == pytest.approx(touched[parts], abs=0.01)


def test_rows_of_a_drawn_routing() -> None:
    """Counted on drawn routings, 3 nodes of 2 ranks: within 3 % of the closed forms."""
    mesh, routing, tokens = Topology(3, 2), Routing(24, 4), 4000
    draw = np.random.default_rng(1).permuted(np.tile(np.arange(24), (tokens, 1)), axis=1)[:, :4]
    rank = draw // 4  # that each copy goes to; the token is on rank 0
    node = rank // 2
    touched = np.stack([(node == n).any(1) for n in range(3)], 1)
    reached = np.stack([(rank == r).any(1) for r in range(6)], 1)
    counted = {
        "flat": ((node != 0).sum() / tokens, (rank == 1).sum() / tokens),
        "hierarchical": (touched[:, 1:].sum() / tokens, reached[:, 1::2].sum() / tokens),
        "allgather": (2.0, reached[:, 1::2].sum() / tokens),
    }
    for method, (rail, inside) in counted.items():
        found = rows(method, routing, mesh)
        assert found is not None
        assert (found.rail, found.node) == (pytest.approx(rail, rel=0.03), pytest.approx(inside, rel=0.03))
    assert arrivals("hierarchical", routing, mesh) == pytest.approx(reached.sum() / tokens, rel=0.03)
    assert arrivals("flat", routing, mesh) == 4


@given(st.integers(2, 16), st.integers(1, 8), st.sampled_from((1, 2, 4, 8)), st.floats(1e8, 1e12), st.floats(1e8, 1e12))
def test_auto_is_within_its_margin_of_the_best(nodes: int, per: int, top: int, rail: float, node: float) -> None:
    routing, mesh = Routing(nodes * per * 8, top), Topology(nodes, per, rail, node)
    choice = choose_method(routing, mesh, 4096.0)
    times = {method: time(method, routing, mesh, 4096.0) for method in METHODS}
    best = min(value for value in times.values() if value is not None)
    assert choice.times == times
    assert times[choice.method] <= best * (1 + MARGIN) * (1 + 1e-9)
    assert choice.method == next(m for m in METHODS if times[m] <= best * (1 + MARGIN) * (1 + 1e-9))


def test_choices_and_their_reasons() -> None:
    assert choose_method(Routing(64, 8), Topology(1, 8)).method == "flat"
    in_one_node = choose_method(Routing(64, 8), Topology(1, 8, 0.0, 4e11))
    assert in_one_node.method == "hierarchical"
    assert "copies that leave a rank: flat 7.00, hierarchical 4.75; 1.47 times as fast as the next" in in_one_node.why
    assert [choose_method(Routing(64, top), Topology(4, 2)).method for top in (1, 2, 4, 8)] == [
        "flat", "hierarchical", "hierarchical", "hierarchical"
    ]  # fmt: skip
    assert choose_method(Routing(256, 8), Topology(2, 8)).method == "allgather"
    slow_inside = choose_method(Routing(64, 2), Topology(4, 8, 1e9, 1e9))
    assert slow_inside.method == "flat"
    assert "copies of a token that leave its node: flat 1.50, allgather 3.00, hierarchical 1.32" in slow_inside.why
    deepseek = rows("hierarchical", Routing(256, 8, 8, 4), Topology(8, 8))
    assert round(deepseek.rail, 2) == 3.46
    across = choose_method(Routing(96, 8, 6, 2), Topology(4, 1))  # nodes cut groups
    assert across.method == "hierarchical"
    assert "copies of a token that leave its node: flat 6.00, allgather 3.00, hierarchical 1.76" in across.why


@pytest.mark.parametrize(
    ("routing", "mesh", "reason"),
    [
        (Routing(64, 8), Topology(1, 8), "there is one node, which no row leaves; a copy for each expert takes"),
        (Routing(64, 8), Topology(1, 8, 0, 4e11), "there is one node, which no row leaves; a rank that holds several"),
        (Routing(256, 1), Topology(8, 8, 5e10, 4e11), "a token's experts lie on few ranks of a node"),
        (Routing(256, 8), Topology(8, 8, 4e11, 5e9), "one hop, over both kinds of links at once"),  # 7.00, 4.63 copies
        (Routing(256, 8), Topology(2, 8, 5e10, 4e11), "a token goes to nearly every node anyway"),
        (Routing(64, 8), Topology(4, 2, 5e10, 5e10), "with the hop inside the nodes it takes little longer"),
        (Routing(256, 8), Topology(8, 8, 5e10, 4e11), "a token's experts share nodes"),
    ],
)
def test_a_reason_is_true_of_its_figures(routing: Routing, mesh: Topology, reason: str) -> None:
    assert choose_method(routing, mesh).why.startswith(reason)


def test_break_even_and_capacity() -> None:
    saved, cost = 4 * 7168 * 2, 3 * 7168 * 2048 * (2 + 4)  # bytes of a row in its four ways; of a copy and its gradient
    assert hot_break_even(2048, 2) == ceil(cost / saved) == 4608
    assert capacity_rows(4096, Routing(256, 8), 1.25) == 160
    assert capacity_rows(10, Routing(256, 8), 100.0) == 10
    assert capacity_rows(100, Routing(3, 1), 1.0) == 34
    assert capacity_rows(1000, Routing(10, 1), 1.1) == 110  # 1.1 * 100 is a bit more in floats


def test_levels_save_more_and_more() -> None:
    layer = moe_layer(Plan(), ExpertSizes(256, 8, 8, 4, 1, 2048, 7168))
    saved = [replace(layer, arriving=6.5).saving(level).bytes for level in Level]
    assert saved == sorted(saved)
    assert saved[0] == 0
    assert [layer.saving(level).flops for level in (Level.NONE, Level.NORM, Level.ACT)] == [0, 0, 0]
    assert layer.saving(Level.ACT).bytes - saved[1] == 2 * 9 * 2048  # the activations' outputs
    full = layer.saving(Level.FULL)
    assert full.bytes == layer.held() - 2 * 6 * 7168  # all but attention's
    assert full.flops == (8 * 4 + 4) * 7168 * 2048 + 2 * 7168 * 256  # first products, router
    assert held_share(counted_layer(Plan(ExpertSizes(8, 2)), True), Level.FULL) == 1.0
