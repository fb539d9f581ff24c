"""Rows on links are those of a count row by row, by one hop and by two."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from schedc.cell.graph import Lane
from schedc.ir.arrays import Floats, Int64
from schedc.ir.plan import ExpertSizes, Method, Plan, Topology
from schedc.plan.counts.link_rows import link_rows, rows_between
from schedc.step.costs.forest import NUMPY, Forest, forest_of, rows_on_ranks

RANKS, LOCAL = 4, 2


def drawn(seed: int, microbatches: int = 3) -> Int64:
    """[microbatches, ranks, experts] rows by source rank, with empty ranks and experts."""
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, 9, (microbatches, RANKS, RANKS * LOCAL)) ** 2
    return np.asarray(rows * (generator.random(rows.shape) < 0.7))


def row_by_row(rows: Int64, computed: Int64) -> Int64:
    """[ranks, ranks] of one microbatch. computed: [ranks, ranks, experts of a rank] by who computes, home, expert."""
    between = np.zeros((RANKS, RANKS), np.int64)
    for expert in range(RANKS * LOCAL):
        takers = np.repeat(np.arange(RANKS), computed[:, expert // LOCAL, expert % LOCAL])
        sources = np.repeat(np.arange(RANKS), rows[:, expert])
        for source, taker in zip(sources, takers, strict=True):
            between[source, taker] += 1
    return between


def planned(rows: Int64, nodes: int = 1) -> Forest:
    homes = rows.sum(1).reshape(len(rows), nodes, RANKS // nodes, LOCAL)
    forest = forest_of(homes, Fraction(1))
    parent = forest.parent + np.arange(0, RANKS, RANKS // nodes)[:, None]
    return Forest(*(each.reshape(len(rows), RANKS, *each.shape[3:]) for each in (parent, forest.taken, forest.quota)))


@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_of_an_expert_go_to_ranks_in_ascending_order_of_sources(nodes: int) -> None:
    for seed in range(20):
        rows = drawn(seed)
        forest = planned(rows, nodes)
        on_ranks = rows_on_ranks(NUMPY, rows.sum(1).reshape(len(rows), RANKS, LOCAL), forest)
        expected = [row_by_row(*each) for each in zip(rows, on_ranks, strict=True)]
        assert (rows_between(rows, forest) == expected).all()
        assert (rows_between(rows) == rows.reshape(len(rows), RANKS, RANKS, LOCAL).sum(-1)).all()


def plan_of(method: Method, nodes: int, top: int = 1) -> Plan:
    return Plan(
        experts=ExpertSizes(RANKS * LOCAL, top), topology=Topology(nodes, RANKS // nodes), tokens=64, method=method
    )


def links(plan: Plan, rows: Int64) -> dict[Lane, Floats]:
    """By lane [microbatches, ranks] rows on links, over those of even routing with as many rows."""
    return {lane: table[0] for lane, table in link_rows(plan, [rows]).items()}


def test_one_hop_carries_what_leaves_a_rank_or_comes() -> None:
    rows = rows_between(drawn(0))
    away = rows * (1 - np.eye(RANKS, dtype=int))
    most = np.maximum(away.sum(2), away.sum(1)) / (rows.sum() / rows.size * (RANKS - 1))
    for method, nodes, lane in ((Method.FLAT, 1, Lane.NODE), (Method.FLAT, 2, Lane.RAIL)):
        told = links(plan_of(method, nodes), rows)
        assert list(told) == [lane]
        assert told[lane] == pytest.approx(most)


def hops(rows: Int64) -> tuple[Int64, Int64]:
    """[ranks] the most rows that each of 2 x 2 ranks sends or gets over the rail, and inside its node, row by row."""
    sent, come = np.zeros((2, 2, RANKS), np.int64)
    for source, target in np.ndindex(RANKS, RANKS):
        relay = target // 2 * 2 + source % 2  # in the position of the source
        for lane, (here, there) in enumerate(((source, relay), (relay, target))):
            if here != there:
                sent[lane, here] += rows[source, target]
                come[lane, there] += rows[source, target]
    rail, node = np.maximum(sent, come)
    return rail, node


def test_two_hops_carry_rows_of_one_expert_over_rail_and_node() -> None:
    """With one expert each row is a token of its own."""
    rows = rows_between(drawn(1))
    told = links(plan_of(Method.HIERARCHICAL, 2), rows)
    even = rows.sum() / rows.size * 2  # to the two ranks of the other node, or from both sources of a rail
    for number, each in enumerate(rows):
        for lane, most in zip((Lane.RAIL, Lane.NODE), hops(each), strict=True):
            assert told[lane][number] == pytest.approx(most / even)


def test_tokens_with_several_experts_in_a_node_travel_there_once() -> None:
    """All choices of a rank in one node: as many tokens as rows over the experts of a token, not as many rows."""
    rows = np.zeros((1, RANKS, RANKS), np.int64)
    rows[0, :, 2:] = 32
    told = links(plan_of(Method.HIERARCHICAL, 2, top=4), rows)
    tokens, even = 16.0, 16 * (1 - 0.5**4)
    assert told[Lane.RAIL] == pytest.approx(np.full((1, RANKS), tokens / even))
    assert links(plan_of(Method.ALLGATHER, 2, top=4), rows)[Lane.RAIL] == pytest.approx(np.ones((1, RANKS)))


def test_without_rows_links_are_as_with_even_ones() -> None:
    nothing = np.zeros((2, RANKS, RANKS), np.int64)
    for method in (Method.FLAT, Method.HIERARCHICAL):
        for table in links(plan_of(method, 2, top=2), nothing).values():
            assert np.isfinite(table).all()
