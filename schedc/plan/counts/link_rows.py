"""Rows that exchanges carry between ranks whose routing was recorded: those of a rank's own tokens stay with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from schedc.cell.graph import Lane
from schedc.ir.arrays import Floats, Int64
from schedc.ir.plan import Method, Plan
from schedc.plan.counts.rows import chosen_method
from schedc.step.costs.forest import NUMPY, Forest, rows_on_ranks


class LinkedRanks(NamedTuple):
    """The ranks of an expert group, in the order of nodes, and the experts of a token."""

    nodes: int
    per_node: int
    top: int


LinkRows = Callable[[Floats, LinkedRanks], Floats]
"""[..., ranks] the rows that a rank sends, or gets if these are more, of [..., ranks, ranks] by source and target."""


def link_rows(plan: Plan, between: Iterable[Int64]) -> dict[Lane, Floats]:
    """By lane [layers, microbatches, ranks] rows on the links of a rank, over those of even routing.

    between: by layer, as of `rows_between`. Two hops carry a token once to a node and to a rank. How many distinct
    tokens there are is expected from the number of rows, as if a token's choices were independent.
    """
    known = [np.asarray(layer, np.float64) for layer in between]
    count = known[0].shape[-1]
    topology = plan.topology
    nodes = topology.nodes if topology and topology.ranks == count else 1
    ranks = LinkedRanks(nodes, count // nodes, plan.experts.top if plan.experts else 1)
    mean = sum(float(layer.sum()) for layer in known) / (len(known) * len(known[0]) * count)
    even = np.full((count, count), mean / count)
    return {lane: _over(rows_of, known, even, ranks) for lane, rows_of in _hops(plan, nodes).items()}


def _hops(plan: Plan, nodes: int) -> Mapping[Lane, LinkRows]:
    """What each lane carries. Where nothing chooses a method, rows take one hop."""
    choice = chosen_method(plan)
    method = choice.method if choice else str(plan.method)
    if method in (Method.FLAT, Method.AUTO):
        return {Lane.RAIL if nodes > 1 else Lane.NODE: _one_hop}
    return {Lane.RAIL: _every_node if method == Method.ALLGATHER else _over_rail, Lane.NODE: _inside_node}


def _over(rows_of: LinkRows, between: list[Floats], even: Floats, ranks: LinkedRanks) -> Floats:
    mean = float(rows_of(even, ranks).max())
    each = np.stack([rows_of(layer, ranks) for layer in between])
    return np.asarray(each / mean if mean else np.ones_like(each))


def _one_hop(rows: Floats, ranks: LinkedRanks) -> Floats:
    """All rows for other ranks."""
    away = rows * ~np.eye(rows.shape[-1], dtype=bool)
    return np.asarray(np.maximum(away.sum(-1), away.sum(-2)))


def _every_node(rows: Floats, ranks: LinkedRanks) -> Floats:
    """Each token goes to each node, whatever its experts."""
    tokens = rows.sum(-1) / ranks.top * (ranks.nodes - 1)
    return np.broadcast_to(tokens.max(axis=-1, keepdims=True), tokens.shape)


def _over_rail(rows: Floats, ranks: LinkedRanks) -> Floats:
    """A token goes once to each other node with experts of it, to the rank in the same position."""
    to_node = _tokens(rows, ranks, 1).sum(-1) * ~np.eye(ranks.nodes, dtype=bool)[:, None]
    sent, arrived = to_node.sum(-1), to_node.sum(-3).swapaxes(-1, -2)
    return np.asarray(np.maximum(sent, arrived)).reshape(*rows.shape[:-1])


def _inside_node(rows: Floats, ranks: LinkedRanks) -> Floats:
    """A rank passes on what its rail has brought, once to each rank of its node with experts of a token."""
    to_rank = _tokens(rows, ranks, ranks.per_node).sum(-4) * ~np.eye(ranks.per_node, dtype=bool)[:, None]
    sent, arrived = to_rank.sum(-1).swapaxes(-1, -2), to_rank.sum(-3)
    return np.asarray(np.maximum(sent, arrived)).reshape(*rows.shape[:-1])


def _tokens(rows: Floats, ranks: LinkedRanks, parts: int) -> Floats:
    """[..., nodes, per node, nodes, parts] expected distinct tokens by source rank and by part of a node."""
    lead, (nodes, near, top) = rows.shape[:-2], ranks
    to_part = rows.reshape(*lead, nodes, near, nodes, parts, -1).sum(-1)
    chosen = to_part.sum((-1, -2), keepdims=True)
    missed = 1 - np.divide(to_part, chosen, out=np.zeros_like(to_part), where=chosen > 0)
    return np.asarray(chosen / top * (1 - missed**top))


def rows_between(rows: Int64, forest: Forest | None = None) -> Int64:
    """[microbatches, ranks, ranks] rows by source rank and by the rank that computes them.

    rows: [microbatches, ranks, experts] by source rank. forest: who computes whose rows, with parents among all ranks;
    None: all rows are computed at home. The rows of an expert go to ranks in ascending order, by source rank.
    """
    count, ranks = rows.shape[:2]
    of_homes = rows.reshape(count, ranks, ranks, -1)
    between: Int64 = of_homes.sum(-1, dtype=np.int64)
    if forest is None:
        return between
    computed = rows_on_ranks(NUMPY, of_homes.sum(1, dtype=np.int64), forest)
    turn, taker, expert = np.nonzero(forest.quota)
    home, quota = forest.parent[turn, taker], forest.quota[turn, taker, expert, None]
    begin = (computed.cumsum(1) - computed)[turn, taker, home, expert, None]
    end = of_homes.cumsum(1, dtype=np.int64)[turn, :, home, expert]  # [copies, sources]
    first = end - of_homes[turn, :, home, expert]
    moved = np.maximum(np.minimum(end, begin + quota) - np.maximum(first, begin), 0)
    by_target = between.swapaxes(1, 2)
    np.subtract.at(by_target, (turn, home), moved)
    np.add.at(by_target, (turn, taker), moved)
    return between
