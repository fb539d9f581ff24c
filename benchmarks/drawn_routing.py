"""Draws routing of a stated skew, and counts the rows that it sends: for `waterfall.py`, and its rank's side.

An expert group of two nodes of two ranks, ``EXPERTS`` experts and ``TOP`` of them per token. Experts are popular by a
Zipf law, whose exponent follows from the skew: rows of the fullest rank over the mean. Each layer has its own popular
experts: nodes change places, so do ranks in a node, and experts in a rank. So all layers have the same skew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.plan import Topology
from schedc.step.costs.exchange import Routing, rows

NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE
EXPERTS, TOP = 16, 4
LOCAL = EXPERTS // RANKS
_SAMPLE = 8192
"""Tokens of a rank from which expectations are taken."""
_FIRST = np.random.default_rng(7).permutation(EXPERTS)
"""[experts] the place of each expert in the order of popularity, before layers change places."""


class LaneRows(NamedTuple):
    """Rows of each hop: the most that a rank sends or gets. Rows of a flat exchange have one hop over both links."""

    rail: float
    node: float


@lru_cache(maxsize=8)
def shares_of(rho: float) -> tuple[float, ...]:
    """[experts] probabilities of experts, before layers change places, at which the fullest rank has rho x the mean."""
    if rho <= 1.0:
        return (1.0 / EXPERTS,) * EXPERTS
    low, high = 0.0, 4.0
    for _ in range(30):
        exponent = (low + high) / 2
        low, high = (exponent, high) if _fullest(exponent) < rho else (low, exponent)
    return tuple(_zipf(high).tolist())


def _zipf(exponent: float) -> Floats:
    share = (1.0 + _FIRST) ** -exponent
    return np.asarray(share / share.sum())


def _fullest(exponent: float) -> float:
    choices = _draw(_zipf(exponent), np.random.default_rng(3), 1, _SAMPLE)
    counts = np.bincount(choices.ravel() // LOCAL, minlength=RANKS)
    return float(counts.max() / counts.mean())


def _draw(share: Floats, generator: np.random.Generator, ranks: int, tokens: int) -> Int64:
    """[ranks, tokens, TOP] different experts: the largest of log(share) + Gumbel noise."""
    noise = generator.gumbel(size=(ranks, tokens, EXPERTS))
    return np.asarray((np.log(share) + noise).argsort(-1)[..., : -TOP - 1 : -1])


def _places(layer: int) -> Int64:
    """[experts] the expert of the first arrangement whose popularity each expert of a layer has."""
    generator = np.random.default_rng([11, layer])
    first = np.arange(EXPERTS).reshape(NODES, PER_NODE, LOCAL)
    nodes = first[generator.permutation(NODES)]
    return np.concatenate([
        generator.permutation(rank) for node in nodes for rank in node[generator.permutation(PER_NODE)]
    ])  # fmt: skip


def drawn(layer: int, turn: int, rho: float, tokens: int) -> Int64:
    """[ranks, tokens, TOP] experts that the tokens of all ranks choose in a layer."""
    share = np.array(shares_of(rho))[_places(layer)]
    return _draw(share, np.random.default_rng([layer, turn]), RANKS, tokens)


def expected(layer: int, rho: float) -> Int64:
    """[ranks, tokens, TOP] a large draw, of other random numbers than any `drawn`, for expectations."""
    return drawn(layer, 1 << 30, rho, _SAMPLE)


def rank_rows(choices: Int64) -> Floats:
    """[ranks] rows that the experts of each rank compute at home, over the mean."""
    counts = np.bincount(choices.ravel() // LOCAL, minlength=RANKS)
    return np.asarray(counts / counts.mean())


def expert_rows(choices: Int64) -> Int64:
    """[ranks, experts] rows by the rank of the token and the expert."""
    return np.stack([np.bincount(of_rank.ravel(), minlength=EXPERTS) for of_rank in choices])


def sent_rows(method: str, choices: Int64) -> LaneRows:
    """Rows of one dispatch per token of a rank, for the rank that sends or gets most. Rows are computed at home."""
    tokens, targets = choices.shape[1], choices // LOCAL
    if method == "flat":
        between = np.stack([np.bincount(row.ravel(), minlength=RANKS) for row in targets])
        return flat_lanes([LaneRows(*_most(between, rank)) for rank in range(RANKS)], tokens)
    wanted = np.stack([(targets == rank).any(-1) for rank in range(RANKS)], -1)  # [source, token, rank]
    node_of = np.arange(RANKS) // PER_NODE
    to_node = np.stack([wanted[..., node_of == node].any(-1).sum(-1) for node in range(NODES)], -1)
    rail = max(max(to_node[rank, 1 - node], to_node[_across(rank), node]) for rank, node in enumerate(node_of))
    inside = np.zeros((RANKS, RANKS))
    for rank, node in enumerate(node_of):  # rows of both ranks of its rail pass through it
        for source in (rank, _across(rank)):
            for target in np.flatnonzero(node_of == node):
                inside[rank, target] += wanted[source, :, target].sum()
    node_rows = max(_most(inside, rank)[1] for rank in range(RANKS))
    return LaneRows(float(rail) / tokens, float(node_rows) / tokens)


def flat_lanes(each: list[LaneRows], tokens: int) -> LaneRows:
    """The most of each link, per token."""
    return LaneRows(*(max(column) / tokens for column in zip(*each, strict=True)))


def uniform_rows(method: str) -> LaneRows:
    """Expected rows per token of one dispatch under uniform routing."""
    traffic = rows(method, Routing(EXPERTS, TOP), Topology(NODES, PER_NODE))
    return LaneRows(traffic.rail, traffic.node)


def _across(rank: int) -> int:
    """The rank in the same position of the other node."""
    return (rank + PER_NODE) % RANKS


def _most(between: Floats, rank: int) -> tuple[float, float]:
    """Rows that a rank sends or gets, whichever is more, over the rail and inside its node. between: [ranks, ranks]."""
    near = [other for other in range(RANKS) if other // PER_NODE == rank // PER_NODE and other != rank]
    far = [other for other in range(RANKS) if other // PER_NODE != rank // PER_NODE]
    rail, node = (float(max(between[rank, others].sum(), between[others, rank].sum())) for others in (far, near))
    return rail, node
