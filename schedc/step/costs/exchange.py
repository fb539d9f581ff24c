"""The cost of dispatching rows to experts: copies, bytes and seconds of three methods, and a choice.

The figures are expectations for tokens whose scores are drawn uniformly. A token has any ``top`` of ``experts``
different ones. With limited groups it has the best ``top`` in its strongest ``limit`` of ``groups``. How many of them
lie in each group is drawn by `schedc.step.costs.limited_groups`; the rest is in closed form.

Copies of a token to other nodes are counted as in docs/guide/plans.md: flat k(N-1)/N, all-gather N-1, one per node
(N-1)(1 - C(E-E/N, k)/C(E, k)). A combine moves the same rows back, and a backward pass both again.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Floats
from schedc.ir.plan import Topology
from schedc.step.costs.limited_groups import drawn_counts

MARGIN = 0.05
"""A simpler method is taken where it is within this of the least time: fewer hops, or equal splits."""


@dataclass(frozen=True)
class Routing:
    """How many experts there are and how a token chooses among them; see `schedc.ir.plan.Experts`."""

    experts: int
    top: int
    groups: int = 1
    limit: int = 1


@dataclass(frozen=True)
class RowTraffic:
    """Expected rows per token that a rank sends over each lane in one dispatch."""

    rail: float
    node: float


@dataclass(frozen=True)
class MethodChoice:
    """The method that was chosen and why, and seconds of one dispatch by method (copies, where no speed is known)."""

    method: str
    why: str
    times: dict[str, float]


@lru_cache(maxsize=256)
def untouched(routing: Routing, parts: int) -> float:
    """Probability that none of a token's experts lies in one of ``parts`` equal parts of the experts.

    It is the mean over the parts, where groups are limited and parts cut them in different ways.
    """
    held, groups = routing.experts // parts, routing.groups
    size = routing.experts // groups
    if routing.limit >= groups or size == 1:
        return _missed(routing.experts, held, routing.top)
    counts = drawn_counts(routing.experts, routing.top, groups, routing.limit)
    if parts % groups == 0:  # a part lies inside one group
        return float(_misses(size, held, routing.top)[counts].mean())
    return sum(_missed_part(counts, size, part * held, (part + 1) * held) for part in range(parts)) / parts


def _missed_part(counts: npt.NDArray[np.intp], size: int, first: int, end: int) -> float:
    """Probability that drawn tokens avoid the experts from ``first`` to before ``end``.

    counts: [tokens, groups] experts of a token in each group of ``size``.
    """
    missed = np.ones(len(counts))
    for group in range(first // size, -(-end // size)):
        inside = min(end, (group + 1) * size) - max(first, group * size)
        missed *= _misses(size, inside, size)[counts[:, group]]
    return float(missed.mean())


def _misses(size: int, held: int, top: int) -> Floats:
    """[min(top, size) + 1] probability that a draw of so many different ones of ``size`` experts avoids ``held``."""
    return np.array([_missed(size, held, taken) for taken in range(min(top, size) + 1)])


def _missed(experts: int, held: int, top: int) -> float:
    """Probability that a draw of ``top`` different ones of ``experts`` avoids ``held`` of them."""
    if held + top > experts:
        return 0.0
    fewer, more = sorted((held, top))  # C(E-h, k) / C(E, k) is symmetric in h and k
    return prod((experts - more - at) / (experts - at) for at in range(fewer))


def rows(method: str, routing: Routing, topology: Topology) -> RowTraffic:
    """Rows per token and rank of one dispatch.

    flat: one row per expert, over both kinds of links at once. The others have two hops. The first hop takes one row to
    each node that needs it (hierarchical), or to every node (allgather). The second takes one row, inside each node, to
    each rank that needs it. The rank that took the row over its rail counts as well.
    """
    others, inside = topology.nodes - 1, topology.per_node - 1
    if method == "flat":
        return RowTraffic(routing.top * others / topology.nodes, routing.top * inside / topology.ranks)
    missed_node, missed_rank = untouched(routing, topology.nodes), untouched(routing, topology.ranks)
    rail = others if method == "allgather" else others * (1 - missed_node)
    return RowTraffic(rail, topology.nodes * inside * (1 - missed_rank))


def arrivals(method: str, routing: Routing, topology: Topology) -> float:
    """Rows that a rank gets in one dispatch per token of its own, its own rows included."""
    return float(routing.top) if method == "flat" else topology.ranks * (1 - untouched(routing, topology.ranks))


METHODS = ("flat", "allgather", "hierarchical")
"""The methods, the simplest first: one hop; a first hop of the same size whatever the routing; two that follow it."""


def time(method: str, routing: Routing, topology: Topology, bytes_per_token: float) -> float:
    """Seconds of one dispatch of a rank; bytes_per_token: its tokens times the bytes of a row.

    The two hops follow each other, while the rows of flat use both kinds of links at once. A link of unknown speed
    takes no time; a rail of unknown speed takes a second per byte, so that copies are compared. With one node there is
    no rail.
    """
    moved = rows(method, routing, topology)
    inside = topology.node if topology.rail or topology.nodes == 1 else 0.0
    rail = moved.rail * bytes_per_token / (topology.rail or 1.0)
    node = moved.node * bytes_per_token / inside if inside else 0.0
    return max(rail, node) if method == "flat" else rail + node


def choose_method(routing: Routing, topology: Topology, bytes_per_token: float = 1.0) -> MethodChoice:
    """The simplest method within `MARGIN` of the least time, and why.

    bytes_per_token: a rank's tokens times the bytes of a row, as in `time`.
    """
    methods = METHODS if topology.nodes > 1 else ("flat", "hierarchical")  # in one node allgather is the latter
    seconds = {method: time(method, routing, topology, bytes_per_token) for method in methods}
    least = min(seconds.values())
    method = next(name for name, value in seconds.items() if value <= least * (1 + MARGIN) + 1e-300)
    return MethodChoice(method, _why(method, seconds, routing, topology), seconds)


_REASONS = {
    "flat": (
        "a token's experts lie on few ranks of a node, so that a copy for each costs little more than one per node",
        "one hop, over both kinds of links at once, is about as fast as two that follow each other, or faster",
    ),
    "allgather": (
        "a token goes to nearly every node anyway, and a block of one size is sent whatever the routing",
        "with the hop inside the nodes it takes little longer than a copy for each target node, and sends equal blocks"
        " whatever the routing",
    ),
    "hierarchical": ("a token's experts share nodes, and not all nodes hold one",) * 2,
}
"""Why a method is chosen: where it sends about as few copies to other nodes as any, and where it does not."""

_IN_ONE_NODE = {
    "flat": "a copy for each expert takes about as long, or `topology` says no speed of the links in it",
    "hierarchical": "a rank that holds several of a token's experts gets one copy",
}


def _why(method: str, times: dict[str, float], routing: Routing, topology: Topology) -> str:
    moved = {name: rows(name, routing, topology) for name in times}
    next_best = min((value for name, value in times.items() if name != method), default=0.0)
    gain = (
        f"; {next_best / times[method]:.2f} times as fast as the next" if next_best > 1.005 * times[method] > 0 else ""
    )
    if topology.nodes == 1:
        copies_text = ", ".join(f"{name} {value.node:.2f}" for name, value in moved.items())
        reason = _IN_ONE_NODE[method]
        return f"there is one node, which no row leaves; {reason}; copies that leave a rank: {copies_text}{gain}"
    copies = {name: value.rail for name, value in moved.items()}
    copies_text = ", ".join(f"{name} {value:.2f}" for name, value in copies.items())
    speeds = "" if topology.rail else " (link speeds are not known: copies are compared)"
    few, many = _REASONS[method]
    reason = few if copies[method] <= min(copies.values()) * (1 + MARGIN) else many
    return f"{reason}; copies of a token that leave its node: {copies_text}{gain}{speeds}"


# ---- hot experts, capacity


def hot_break_even(width: int, bytes_of: int) -> int:
    """Rows that a rank must save per hot expert and microbatch, so that copying the expert moves fewer bytes.

    A copy costs three matrices out and their gradients back, in float32 at least. A row that stays saves its two ways
    in forward and in backward. ``hidden`` is in both and cancels.
    """
    return ceil(3 * width * (bytes_of + max(4, bytes_of)) / (4 * bytes_of))


def capacity_rows(tokens: int, routing: Routing, factor: float) -> int:
    """Rows that an expert takes from one rank: ceil(T k / E * factor), at most all tokens; the factor as written."""
    return min(tokens, ceil(Fraction(str(factor)) * tokens * routing.top / routing.experts))


class BoundedRows(NamedTuple):
    """Rows of the buffers that a bound gives, each for one source rank.

    pair: rows of the experts of a rank. rail: tokens that a node gets. node: tokens that a rank gets.
    """

    pair: int
    rail: int
    node: int


def bounded_rows(
    tokens: int, routing: Routing, topology: Topology, factor: float, *, alone: bool = False
) -> BoundedRows:
    """Buffers of ``factor`` times the mean rows of ``tokens`` of a rank, at most as many rows as there can be.

    alone: whether copies of experts may let each choice of a token travel alone inside a node.
    """
    own = max(1, routing.experts // topology.ranks)
    pair = min(tokens * min(routing.top, own), ceil(Fraction(str(factor)) * tokens * routing.top / topology.ranks))
    node = min(tokens * (routing.top if alone else 1), _room(tokens, routing, topology.ranks, factor))
    return BoundedRows(pair, min(tokens, _room(tokens, routing, topology.nodes, factor)), node)


def _room(tokens: int, routing: Routing, parts: int, factor: float) -> int:
    """``factor`` times the mean number of tokens that have an expert in one of ``parts`` equal parts."""
    return ceil(factor * tokens * (1 - untouched(routing, parts)))
