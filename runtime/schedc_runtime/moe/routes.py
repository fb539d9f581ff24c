"""Plans where every row of a MoE layer goes, on each rank from everyone's routing, without messages.

    x [N, H], w [N, k]                                       out [N, H]
      | pack                                                   ^ collect
      v                                                        |
    rows, weights --rail--> relay --node--> arrive    depart --node--> relay_back --rail--> rows
    rows, weights ----------flat----------> arrive    depart ----------flat---------------> rows

`arrive` gives one row per (token, local expert), sorted by expert, then source rank, then token. The experts see the
same rows in the same order whatever the method. On the way back contributions are added in one tree: on the expert's
rank by expert, in the node by rank, then by node, always upwards and from zero. Hierarchical methods add where the
rows pass. ``flat`` sends every contribution back, and the source adds all three levels. Hence the methods agree bit
by bit, in outputs and gradients.

    flat           a copy of a row for each of its experts
    hierarchical   a copy for each node that has one of them; inside it one for each rank that has one
    allgather      a copy for every node, whatever the routing; inside it as above

One copy per node and the fan-out inside it: DeepSeek-V3 technical report, section 3.2.2. Whole blocks of rows between
ranks of the same position: Huawei's hierarchical All-to-All.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from schedc.ir.arrays import Int64
from schedc_runtime.moe.exchange import ABSENT, Hop
from schedc_runtime.moe.hot import NOTHING_HOT, Lending
from schedc_runtime.moe.ordered_sums import Places, Tree, bounds, on, places, simple_tree, tree

Flags = NDArray[np.bool_]
Choices = NDArray[np.integer[Any]]
"""Experts by number, negative for none, in the integer type in which they travelled."""

Method = Literal["flat", "hierarchical", "allgather"]


@dataclass(frozen=True)
class Shape:
    """The sizes that all microbatches share.

    experts: number of experts of all ranks. nodes, per_node: of the group; rank = node * per_node + position. rank:
    this rank. capacity: rows of one expert from one rank, to which blocks are padded; None: exact counts.
    """

    experts: int
    nodes: int = 1
    per_node: int = 1
    rank: int = 0
    method: Method = "flat"
    capacity: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def local(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.ranks

    def bound(self, experts: int, most: int) -> int | None:
        """Padded rows of a block that ``experts`` experts take from one rank, at most ``most``; None: no capacity."""
        return None if self.capacity is None else min(most, experts * self.capacity)


class HopSplits(NamedTuple):
    """[members] rows to and from each member of a hop, and gate weights likewise."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    send_weights: tuple[int, ...]
    receive_weights: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The way of one microbatch through a MoE layer, as one rank sees it.

    counts: [experts of this rank] rows of each expert after `arrive`, padding included. tokens: N of this rank.
    received: rows that reach this rank's experts, without padding. hops: splits by hop. packing, relaying, arriving:
    (tree of rows, tree of gate weights). lending: the hot experts; ``shape`` and ``counts`` then have a slot for each,
    after the experts of every rank.
    """

    shape: Shape
    tokens: int
    counts: tuple[int, ...]
    received: int
    hops: dict[Hop, HopSplits]
    packing: tuple[Tree, Tree]
    relaying: tuple[Tree, Tree] | None
    arriving: tuple[Tree, Tree]
    lending: Lending = NOTHING_HOT

    def splits(self, hop: Hop, reverse: bool, payload: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Send and receive splits of a payload: rows alone, or rows and gate weights."""
        splits = self.hops[hop]
        send, receive = [splits.send, splits.send_weights][:payload], [splits.receive, splits.receive_weights][:payload]
        return (receive, send) if reverse else (send, receive)


def plan_route(everyone: Tensor, shape: Shape, choose: Callable[[Choices], Lending] | None = None) -> Route:
    """The route of one microbatch.

    everyone: [ranks, N, k] experts from `RoutingExchange`, distinct per row. choose: picks a routing's hot experts.

    Copies the routing to the host once. Raises ValueError if the routing does not fit the shape.
    """
    routing: Choices = everyone.detach().cpu().numpy()
    if routing.shape[0] != shape.ranks or shape.experts % shape.ranks:
        raise ValueError(
            f"a routing of {routing.shape[0]} ranks and {shape.experts} experts for a group of {shape.ranks} ranks"
        )
    if routing.size and int(routing.max()) >= shape.experts:
        raise ValueError(f"expert {int(routing.max())} is chosen where there are {shape.experts}")
    lending = choose(routing) if choose else NOTHING_HOT
    if lending.hot:
        routing, shape = lending.placed(routing), replace(shape, experts=shape.experts + shape.ranks * len(lending.hot))
    route = replace(_PLANS[shape.method](routing, shape), lending=lending)
    if everyone.device.type == "cpu":
        return route
    moved = [None if pair is None else (on(everyone.device, pair[0]), on(everyone.device, pair[1]))
             for pair in (route.packing, route.relaying, route.arriving)]  # fmt: skip
    return replace(route, packing=moved[0], relaying=moved[1], arriving=moved[2])  # type: ignore[arg-type]


def pack(route: Route, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [N, H] and gate weights [N, k] to what the first hop sends: [rows, H] and [weights]."""
    rows, gates = route.packing
    return rows.spread(x), gates.spread(weights.reshape(-1))


def relay(route: Route, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, H] and [weights] that came over the rail, to those that go on inside the node."""
    relaying = _relaying(route)
    return relaying[0].spread(rows), relaying[1].spread(weights)


def arrive(route: Route, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, H] and [weights] that came over the last hop, to the rows of the local experts: [P, H] and [P].

    Each expert has ``route.counts`` rows, sorted by source rank and token. Padding is zero, its weight too.
    """
    return route.arriving[0].spread(rows), route.arriving[1].spread(weights)


def depart(route: Route, outputs: Tensor) -> Tensor:
    """[P, H] outputs of the experts times gate weights, to the rows [rows, H] that go back over the last hop."""
    return route.arriving[0].total(outputs)


def relay_back(route: Route, rows: Tensor) -> Tensor:
    """[rows, H] that came back inside the node, to those that go back over the rail."""
    return _relaying(route)[0].total(rows)


def collect(route: Route, rows: Tensor) -> Tensor:
    """[rows, H] that came back to this rank, summed to [N, H]."""
    return route.packing[0].total(rows)


def _relaying(route: Route) -> tuple[Tree, Tree]:
    if route.relaying is None:
        raise ValueError("a flat route has no relay")
    return route.relaying


def _plan_flat(routing: Choices, shape: Shape) -> Route:
    """One copy per (token, expert), in the order of expert and token."""
    size, local, mine = shape.ranks, shape.local, routing[shape.rank].astype(np.int64)

    token, slot = np.nonzero(mine >= 0)
    order = np.argsort(mine[token, slot], kind="stable")
    token, slot = token[order], slot[order]
    expert = mine[token, slot]
    sent = places(expert, shape.experts, shape.capacity)
    tokens = _tokens(mine)
    rows = tree(_flat_levels(token, expert, sent, _owners(mine, local), shape, tokens), token, sent)
    gates = simple_tree(token * mine.shape[1] + slot, sent, (0, len(token)), tokens * mine.shape[1])

    held = _held(routing, shape)
    source, token, slot = np.nonzero(held)
    expert = routing[held].astype(np.int64) % local
    order = np.lexsort((token, expert, source))
    source, token, expert = source[order], token[order], expert[order]
    arrived = places(source * local + expert, size * local, shape.capacity)
    order, grouped = _grouped(expert, source, token, shape)
    arriving = simple_tree(arrived.at[order], grouped, (0, len(order)), arrived.total)

    send, receive = _sums(sent.sizes, size), _sums(arrived.sizes, size)
    return Route(
        shape, tokens, _sums(grouped.sizes, local), len(order),
        {"flat": HopSplits(send, receive, send, receive)}, (rows, gates), None, (arriving, arriving),
    )  # fmt: skip


def _flat_levels(
    token: Int64, expert: Int64, sent: Places, owner: Int64, shape: Shape, tokens: int
) -> list[tuple[Int64, Int64 | None, tuple[int, ...], int]]:
    """The levels token, (node, token), (rank, token), (token, expert), which other methods sum on three ranks."""
    per_rank = _hits(owner, np.arange(shape.ranks))
    per_node: Flags = np.any(per_rank.reshape(shape.nodes, shape.per_node, len(owner)), axis=1)
    node, of_node = np.nonzero(per_node)
    rank, of_rank = np.nonzero(per_rank)
    node_row, rank_row = _numbered(per_node), _numbered(per_rank)
    by_position = np.argsort(rank % shape.per_node, kind="stable")
    by_expert = np.argsort(expert % shape.local, kind="stable")
    return [
        (of_node, None, bounds(node, shape.nodes), tokens),
        (
            node_row[rank // shape.per_node, of_rank][by_position], by_position,
            bounds((rank % shape.per_node)[by_position], shape.per_node), len(node),
        ),
        (
            rank_row[expert // shape.local, token][by_expert], sent.at[by_expert],
            bounds((expert % shape.local)[by_expert], shape.local), len(rank),
        ),
    ]  # fmt: skip


def _plan_hierarchical(routing: Choices, shape: Shape) -> Route:
    """One copy per (token, node) on the rail, one per (token, rank) inside the node."""
    local, nodes, per_node = shape.local, shape.nodes, shape.per_node
    node, position = divmod(shape.rank, per_node)
    count, top = routing.shape[1:]
    tokens = _tokens(routing[shape.rank])
    on_rail, on_node = _capacities(shape, count, top)

    # Masks are [targets, ..., N] for rows and [targets, ..., N, k] for gate weights. From this rank to each node:
    wanted = _owners(routing[shape.rank], per_node * local) == np.arange(nodes)[:, None, None]
    masks = _masks(wanted, routing[shape.rank], shape)
    numbers = np.arange(count), np.arange(count * top).reshape(count, top)
    packing, send = _forks(masks, 1, numbers, on_rail, (tokens, tokens * top))

    # From each node, from the ranks on this rail; and from this rank to each rank of the node:
    passing = routing[position::per_node]
    targets = _owners(passing, local) == np.arange(node * per_node, (node + 1) * per_node)[:, None, None, None]
    inside: Flags = np.any(targets, axis=0)
    indices, sizes = _landings(_masks(inside, passing, shape), 1, on_rail)
    small = tuple(int(x.sum()) for x in sizes)
    relaying, onward = _forks((np.any(targets, axis=-1), targets), 2, indices, on_node, small)
    rail = HopSplits(send[0], _sums(sizes[0], nodes), send[1], _sums(sizes[1], nodes))

    # From each rank of the node and every node behind it, for the experts of this rank:
    mine = np.ascontiguousarray(_held(routing, shape).reshape(nodes, per_node, count, top).swapaxes(0, 1))
    rows: Flags = np.any(mine, axis=-1)
    indices, sizes = _landings((rows, mine), 2, on_node)
    passer, source, token, slot = np.nonzero(mine)
    rank = source * per_node + passer
    expert = routing[rank, token, slot].astype(np.int64) % local
    order, grouped = _grouped(expert, rank, token, shape)
    row, pair = indices[0][passer, source, token][order], indices[1][passer, source, token, slot][order]
    arriving = (
        simple_tree(row, grouped, bounds(expert[order], local), int(sizes[0].sum())),
        simple_tree(pair, grouped, (0, len(order)), int(sizes[1].sum())),
    )
    inner = HopSplits(onward[0], _sums(sizes[0], per_node), onward[1], _sums(sizes[1], per_node))
    counts = _sums(grouped.sizes, local)
    return Route(shape, tokens, counts, len(order), {"rail": rail, "node": inner}, packing, relaying, arriving)


def _capacities(
    shape: Shape, count: int, top: int
) -> tuple[tuple[int | None, int | None], tuple[int | None, int | None]]:
    """Padded sizes of blocks from one rank, on the rail and in the node: (rows, gate weights) each."""
    on_node = shape.bound(shape.local, count), shape.bound(shape.local, count * top)
    if shape.method == "allgather" and shape.capacity is not None:
        return (count, count * top), on_node
    experts = shape.per_node * shape.local
    return (shape.bound(experts, count), shape.bound(experts, count * top)), on_node


def _owners(routing: Choices, each: int) -> Int64:
    """The holder of each choice, where every holder has ``each`` experts; negative for none."""
    owners: Int64 = np.floor_divide(routing, each, dtype=np.int64)
    return owners


def _held(routing: Choices, shape: Shape) -> Flags:
    """Which choices fall on this rank. Comparing is faster than dividing, on the routing of all ranks."""
    first = shape.rank * shape.local
    return (routing >= first) & (routing < first + shape.local)


def _masks(pairs: Flags, routing: Choices, shape: Shape) -> tuple[Flags, Flags]:
    """Which rows and gate weights cross the rail: those that the target needs, or all for ``allgather``."""
    if shape.method == "allgather":
        pairs = np.broadcast_to((routing[..., :1] != ABSENT), pairs.shape)
    rows: Flags = np.any(pairs, axis=-1)
    return rows, pairs


def _forks(
    masks: tuple[Flags, Flags],
    lead: int,
    indices: tuple[Int64, Int64],
    capacity: tuple[int | None, int | None],
    small: tuple[int, ...],
) -> tuple[tuple[Tree, Tree], tuple[tuple[int, ...], tuple[int, ...]]]:
    """(trees, splits) of the copies to each target, for rows and for gate weights.

    lead: number of leading axes of a mask that give the block of an entry; the first axis is the target. indices:
    index of the row that an entry copies. small: number of rows to copy.
    """
    trees, splits = [], []
    for mask, source, bound, size in zip(masks, indices, capacity, small, strict=True):
        layout, where = _laid_out(mask, lead, bound)
        of = np.broadcast_to(source, mask.shape)[where]
        trees.append(simple_tree(of, layout, bounds(where[0], mask.shape[0]), size))
        splits.append(_sums(layout.sizes, mask.shape[0]))
    return (trees[0], trees[1]), (splits[0], splits[1])


def _landings(
    masks: tuple[Flags, Flags], lead: int, capacity: tuple[int | None, int | None]
) -> tuple[tuple[Int64, Int64], tuple[Int64, Int64]]:
    """(indices, sizes): where each entry of a mask lies after it arrived, and the sizes of the blocks."""
    indices, sizes = [], []
    for mask, bound in zip(masks, capacity, strict=True):
        layout, where = _laid_out(mask, lead, bound)
        table = np.zeros(mask.shape, dtype=np.int64)
        table[where] = layout.at
        indices.append(table)
        sizes.append(layout.sizes)
    return (indices[0], indices[1]), (sizes[0], sizes[1])


def _laid_out(mask: Flags, lead: int, capacity: int | None) -> tuple[Places, tuple[Int64, ...]]:
    """The places of a mask's entries, in order by block. Both ends of a hop lay out a mask alike."""
    where = np.nonzero(mask)
    blocks = np.ravel_multi_index(where[:lead], mask.shape[:lead])
    return places(blocks, int(np.prod(mask.shape[:lead])), capacity), where


def _grouped(expert: Int64, source: Int64, token: Int64, shape: Shape) -> tuple[Int64, Places]:
    """(order, places) of the experts' rows, sorted by expert, source rank, token."""
    order = np.lexsort((token, source, expert))
    blocks = expert[order] * shape.ranks + source[order]
    return order, places(blocks, shape.local * shape.ranks, shape.capacity)


def _hits(owner: Int64, targets: Int64) -> Flags:
    """[targets, N] whether a token has an expert on a target. owner: [N, k] owners of its experts."""
    hits: Flags = np.any(owner == targets[:, None, None], axis=-1)
    return hits


def _numbered(mask: Flags) -> Int64:
    """[...] the number of each set entry of a mask, counted in order."""
    return (np.cumsum(mask) - 1).reshape(mask.shape)


def _tokens(mine: Choices) -> int:
    return int((mine[:, 0] != ABSENT).sum())


def _sums(sizes: Int64, groups: int) -> tuple[int, ...]:
    return tuple(sizes.reshape(groups, -1).sum(1).tolist())


_PLANS: dict[Method, Callable[[Choices, Shape], Route]] = {
    "flat": _plan_flat,
    "hierarchical": _plan_hierarchical,
    "allgather": _plan_hierarchical,
}
