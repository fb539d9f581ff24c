"""The plan that routes had before: in numpy on the host, from everyone's choices. `routes.py` compares against it.

`plan` makes the trees of one rank. `NumpyTree.total` adds copies of rows by one `index_add_` for each chunk of them.
Nothing of the runtime uses this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schedc.ir.arrays import Int64
from schedc_runtime.moe.counts import ABSENT, Method, Shape

Flags = NDArray[np.bool_]
Numbers = NDArray[np.integer[Any]]
"""Experts by number, negative for none, in the integer type in which they travelled."""


@dataclass(frozen=True)
class SumLevel:
    """The copies of ``small`` rows.

    of: [copies] the row that each copy is of. at: [copies] index of each copy on the larger side; None: in order.
    bounds: [chunks + 1] where the chunks of copies begin and end. No row occurs twice in a chunk, so that a chunk is
    added at once with the same bits on every device. Chunks are added in their order.
    """

    of: Tensor
    at: Tensor | None
    bounds: tuple[int, ...]
    small: int

    def total(self, copies: Tensor) -> Tensor:
        """[larger side, ...] to [small, ...]: sums the copies of each row from zero, chunk after chunk."""
        result = copies.new_zeros(self.small, *copies.shape[1:])
        for start, end in pairwise(self.bounds):
            chunk = copies[start:end] if self.at is None else copies.index_select(0, self.at[start:end])
            result.index_add_(0, self.of[start:end], chunk)
        return result


@dataclass(frozen=True)
class NumpyTree:
    """Copies of rows in levels, from the trunk to the leaves. Sums run through the same levels, backwards.

    direct: [leaves] the row of the trunk that each leaf copies. blank: [paddings] leaves that are padding, zero.
    """

    levels: tuple[SumLevel, ...]
    direct: Tensor
    blank: Tensor | None = None

    def total(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]: sums of copies."""
        for level in reversed(self.levels):
            leaves = level.total(leaves)
        return leaves


@dataclass(frozen=True)
class Places:
    """Indices of entries that lie in blocks, each block as long as its entries or padded to one capacity.

    at: [entries] index of each entry. sizes: [blocks] rows of each block, padding included. full: no padding, so that
    ``at`` counts up from 0.
    """

    at: Int64
    sizes: Int64
    full: bool

    @property
    def total(self) -> int:
        return int(self.sizes.sum())


def places(blocks: Int64, count: int, capacity: int | None) -> Places:
    """The places of entries sorted by block.

    blocks: [entries] block of each entry. count: number of blocks. capacity: rows of a padded block; None: no padding.

    Raises ValueError if a block has more entries than its capacity.
    """
    sizes = np.bincount(blocks, minlength=count)
    if capacity is None:
        return Places(np.arange(len(blocks)), sizes, True)
    if sizes.size and int(sizes.max()) > capacity:
        raise ValueError(f"block {int(sizes.argmax())} has {int(sizes.max())} entries, its capacity is {capacity}")
    first = np.cumsum(sizes) - sizes
    indices = blocks * capacity + np.arange(len(blocks)) - first[blocks]
    return Places(indices, np.full(count, capacity), len(blocks) == count * capacity)


def bounds(chunks: Int64, count: int) -> tuple[int, ...]:
    """[chunks + 1] where the chunks of entries sorted by chunk begin and end, without empty chunks."""
    return tuple(np.unique(np.searchsorted(chunks, np.arange(count + 1))).tolist()) if len(chunks) else ()


def tree(
    levels: Sequence[tuple[Int64, Int64 | None, tuple[int, ...], int]], direct: Int64, layout: Places
) -> NumpyTree:
    """A tree from the columns of its `SumLevel`s: of [copies], at [copies] or None, bounds and small.

    direct: [leaves without padding] the row of the trunk that each leaf copies. layout: the leaves' places.
    """
    all_levels = [
        SumLevel(torch.from_numpy(of), None if at is None or _counts_up(at) else torch.from_numpy(at), cuts, small)
        for of, at, cuts, small in levels
    ]
    # A level of one copy per row, in order, adds nothing. The last one stays, so that every sum begins from zero.
    kept = tuple(x for x in all_levels[:-1] if x.at is not None or len(x.of) != x.small or not _counts_up(x.of.numpy()))
    if layout.full:
        return NumpyTree((*kept, all_levels[-1]), torch.from_numpy(direct))
    whole = np.zeros(layout.total, dtype=np.int64)
    whole[layout.at] = direct
    return NumpyTree(
        (*kept, all_levels[-1]),
        torch.from_numpy(whole),
        torch.from_numpy(np.setdiff1d(np.arange(layout.total), layout.at)),
    )


def _counts_up(numbers: Int64) -> bool:
    return bool((numbers == np.arange(len(numbers))).all())


def simple_tree(of: Int64, layout: Places, cuts: tuple[int, ...], small: int) -> NumpyTree:
    """A tree of one level.

    of: [copies] the row that each copy is of. cuts: [chunks + 1] where chunks begin and end. small: number of rows.
    """
    return tree([(of, None if layout.full else layout.at, cuts, small)], of, layout)


class PairSplits(NamedTuple):
    """[members] rows to and from each member of a hop, and gate weights likewise."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    send_weights: tuple[int, ...]
    receive_weights: tuple[int, ...]


@dataclass(frozen=True)
class NumpyRoute:
    """The way of one microbatch, as one rank sees it; see `schedc_runtime.moe.routes.Route`."""

    shape: Shape
    tokens: int
    counts: tuple[int, ...]
    received: int
    hops: dict[str, PairSplits]
    packing: tuple[NumpyTree, NumpyTree]
    relaying: tuple[NumpyTree, NumpyTree] | None
    arriving: tuple[NumpyTree, NumpyTree]


def plan(everyone: Tensor, shape: Shape) -> NumpyRoute:
    """The route of one rank. everyone: [ranks, N, k] experts, distinct per row."""
    return _PLANS[shape.method](everyone.detach().cpu().numpy(), shape)


def _plan_flat(routing: Numbers, shape: Shape) -> NumpyRoute:
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
    return NumpyRoute(
        shape, tokens, _sums(grouped.sizes, local), len(order),
        {"flat": PairSplits(send, receive, send, receive)}, (rows, gates), None, (arriving, arriving),
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


def _plan_hierarchical(routing: Numbers, shape: Shape) -> NumpyRoute:
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
    rail = PairSplits(send[0], _sums(sizes[0], nodes), send[1], _sums(sizes[1], nodes))

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
    inner = PairSplits(onward[0], _sums(sizes[0], per_node), onward[1], _sums(sizes[1], per_node))
    counts = _sums(grouped.sizes, local)
    return NumpyRoute(shape, tokens, counts, len(order), {"rail": rail, "node": inner}, packing, relaying, arriving)


def _capacities(
    shape: Shape, count: int, top: int
) -> tuple[tuple[int | None, int | None], tuple[int | None, int | None]]:
    """Padded sizes of blocks from one rank, on the rail and in the node: (rows, gate weights) each."""
    on_node = _bound(shape, shape.local, count), _bound(shape, shape.local, count * top)
    if shape.method == "allgather" and shape.capacity is not None:
        return (count, count * top), on_node
    experts = shape.per_node * shape.local
    return (_bound(shape, experts, count), _bound(shape, experts, count * top)), on_node


def _bound(shape: Shape, experts: int, most: int) -> int | None:
    return None if shape.capacity is None else min(most, experts * shape.capacity)


def _owners(routing: Numbers, each: int) -> Int64:
    """The holder of each choice, where every holder has ``each`` experts; negative for none."""
    owners: Int64 = np.floor_divide(routing, each, dtype=np.int64)
    return owners


def _held(routing: Numbers, shape: Shape) -> Flags:
    """Which choices fall on this rank. Comparing is faster than dividing, on the routing of all ranks."""
    first = shape.rank * shape.local
    return (routing >= first) & (routing < first + shape.local)


def _masks(pairs: Flags, routing: Numbers, shape: Shape) -> tuple[Flags, Flags]:
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
) -> tuple[tuple[NumpyTree, NumpyTree], tuple[tuple[int, ...], tuple[int, ...]]]:
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


def _tokens(mine: Numbers) -> int:
    return int((mine[:, 0] != ABSENT).sum())


def _sums(sizes: Int64, groups: int) -> tuple[int, ...]:
    return tuple(sizes.reshape(groups, -1).sum(1).tolist())


_PLANS: dict[Method, Callable[[Numbers, Shape], NumpyRoute]] = {
    "flat": _plan_flat,
    "hierarchical": _plan_hierarchical,
    "allgather": _plan_hierarchical,
}
