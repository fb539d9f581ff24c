"""Makes the trees of a route by index arithmetic on the device, from a rank's own rows and everyone's counts.

    flat      leaves: (token, expert) by expert, token     sums: by rank, by node, by token
    fan       leaves: (target, row) by target, row         sums: by row, targets upwards
    landing   leaves: (expert, source rank, token)         sums: by row, experts upwards

Lists have lengths that are known: exact ones from the joined sizes, or those of padded blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.moe.bags import Bags, Copies, Moves, Tree, taken
from schedc_runtime.moe.counts import Choices, Counts, Shape, counted_group_sizes, floor_divided, owners, run_starts


class Trees(NamedTuple):
    """The trees of rows and of gate weights."""

    rows: Tree
    gates: Tree


def inverse(order: Tensor) -> Tensor:
    """[entries] the place of each entry in ``order`` [entries], a permutation."""
    return torch.empty_like(order).scatter_(0, order, arange(len(order), order))


def set_entries(mask: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """([room], [rows + 1]) flat indices of the set entries of a mask [rows, k], and how many stand before each row.

    The indices ascend; behind the last one stands -1. Entries beyond ``room`` are left out.
    """
    flat = mask.flatten()
    counted = flat.cumsum(0)
    where = (counted * flat).clamp_(max=room + 1)  # 0 takes what is not set, room + 1 what has no room
    entries = torch.full((room + 2,), -1, device=mask.device).scatter_(0, where, arange(len(flat), flat))
    return entries[1:-1], functional.pad(counted.view(mask.shape)[:, -1], (1, 0))


def arange(count: int, like: Tensor) -> Tensor:
    """[count] whole numbers from 0 on the device of ``like`` [...]."""
    return torch.arange(count, device=like.device)


class Runs(NamedTuple):
    """Neighbouring choices of a token that one rank or node holds.

    starts: [levels][N, k] which choices begin a run. counted: [levels][N, k] runs that have begun, up to each choice.
    bags: [levels] number of runs.
    """

    starts: tuple[Tensor, ...]
    counted: tuple[Tensor, ...]
    bags: tuple[Tensor, ...]


def runs(choices: Choices, shape: Shape) -> Runs:
    """The runs of a rank's choices, by each of `group_sizes`."""
    starts = tuple(
        run_starts(owners(choices.ids, shape.experts, size), shape.experts // size)
        for size in counted_group_sizes(shape)
    )
    counted = tuple(start.flatten().cumsum(0) for start in starts)
    return Runs(
        starts,
        tuple(count.view(start.shape) for count, start in zip(counted, starts, strict=True)),
        tuple(count[-1:].sum() for count in counted),
    )


def flat_packing(choices: Choices, counts: Counts, own: Runs, bags: Sequence[int]) -> Trees:
    """The copies of tokens that a flat dispatch sends. bags: number of sums of each level."""
    shape, (tokens, top) = counts.shape, choices.ids.shape
    numbers = choices.unsorted.flatten()
    order = numbers.argsort(stable=True)
    place = inverse(order)
    if not shape.padded:
        at = place.view(tokens, top).gather(1, choices.slots).flatten()
        levels = flat_levels(at, None, own, bags, (tokens, top))
        return Trees(Copies(floor_divided(order, top), levels), Moves(order, place))
    if shape.capacity is not None:
        layout, block = Blocks(counts.rows[shape.rank], shape.capacity), numbers.long()
    else:
        layout, block = Blocks(counts.by_rank[shape.rank], shape.block), floor_divided(numbers, shape.local).long()
    sorted_at, blank = layout.sources(tokens * top)
    leaf = layout.leaves(place, block)
    kept = choices.ids < shape.experts
    at = leaf.view(tokens, top).gather(1, choices.slots).flatten()
    entries, ends = set_entries(kept, tokens * top)
    at = taken(at, entries.clamp(min=0), None)
    levels = flat_levels(at, (kept.flatten().cumsum(0) - 1, ends), own, bags, (tokens, top))
    chosen = taken(order, sorted_at, None)
    return Trees(
        Copies(floor_divided(chosen, top), levels, blank=blank),
        Moves(chosen, leaf, blank=blank, absent=numbers >= shape.experts),
    )


def reordered(slots: Tensor) -> Moves:
    """The gate weights [N * k] of a rank in the order of its choices. slots: [N, k] see `Choices`."""
    tokens, top = slots.shape
    direct = (arange(tokens, slots)[:, None] * top + slots).flatten()
    return Moves(direct, inverse(direct))


class Blocks:
    """Sorted entries in blocks that are padded to one capacity. counts: [blocks] entries of each."""

    def __init__(self, counts: Tensor, capacity: int) -> None:
        self.counts, self.capacity = counts.clamp(max=capacity), capacity
        self.first = counts.cumsum(0) - counts

    def sources(self, entries: int) -> tuple[Tensor, Tensor]:
        """([leaves], [leaves]) the sorted entry of each leaf, and which leaves are padding."""
        place = arange(self.capacity, self.counts)
        blank = place >= self.counts[:, None]
        return (self.first[:, None] + place).clamp_(max=max(0, entries - 1)).flatten(), blank.flatten()

    def leaves(self, places: Tensor, blocks: Tensor) -> Tensor:
        """[entries] the leaf of each entry: ``places`` among the sorted ones, and its block; any for no block."""
        block = blocks.clamp(max=len(self.first) - 1)
        within = (places - self.first.index_select(0, block)).clamp_(0, self.capacity - 1)
        return block * self.capacity + within


def flat_levels(
    at: Tensor, kept: tuple[Tensor, Tensor] | None, own: Runs, bags: Sequence[int], shape: tuple[int, int]
) -> tuple[Bags, ...]:
    """The sums of a flat combine.

    at: [entries] the leaf of each kept choice, by token and expert. kept: ([N * k], [N + 1]) the number of each kept
    choice, and how many stand before each token; None: all are kept. shape: (N, k).
    """
    tokens, top = shape
    places, ends = kept or (arange(tokens * top, at), arange(tokens + 1, at) * top)
    last, levels = ends[-1], []
    for start, counted, runs_begun, room in zip(*own, bags, strict=True):
        table = last.expand(room + 2).clone()
        table.scatter_(0, (counted * start).flatten(), places)  # entry 0 takes what begins no run
        levels.append(Bags.of(at, table[1:], padded=kept is not None))
        at, places, last = arange(room, at), counted.flatten() - 1, runs_begun
        ends = functional.pad(counted[:, -1], (1, 0))
    return (*levels, Bags.of(at, ends, padded=kept is not None))


def flat_landing(counts: Counts, rows: int) -> Trees:
    """The rows that a flat dispatch brings, sorted by source and expert, to those of the experts.

    rows: their number.
    """
    shape = counts.shape
    if shape.capacity is not None:
        block = torch.arange(rows, device=counts.table.device).view(shape.ranks, shape.local, shape.capacity)
        direct = block.transpose(0, 1).reshape(-1)
        moves = Moves(direct, inverse(direct))
        return Trees(moves, moves)
    if shape.bounds is not None:
        return bounded_landing(counts, rows)
    sizes = counts.mine.long()  # [R, local]
    coming, by_expert = sizes.flatten(), sizes.t().flatten()
    ends = coming.cumsum(0).view_as(sizes)  # where blocks end as they come
    grouped_ends = by_expert.cumsum(0).view(shape.local, shape.ranks)  # where they end by expert
    shift = ends.t() - grouped_ends
    number = arange(rows, sizes)
    here = shift.flatten().repeat_interleave(by_expert, output_size=rows)
    there = shift.t().flatten().repeat_interleave(coming, output_size=rows)
    moves = Moves(here.add_(number), number - there)
    return Trees(moves, moves)


def bounded_landing(counts: Counts, rows: int) -> Trees:
    """As `flat_landing`, from blocks of one size whose filled parts the device alone knows; padding comes last.

    Rows beyond a block are left out, so that every index is one of a row.
    """
    shape, number = counts.shape, torch.arange(rows, device=counts.table.device)
    block = torch.arange(shape.ranks, device=number.device)[:, None] * shape.block
    ends = counts.mine.cumsum(1).clamp_(max=shape.block)  # [R, local] ends of experts inside each block
    sizes = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    grouped_ends = sizes.t().flatten().cumsum(0)
    shift = (block + ends - sizes).t().flatten() - (grouped_ends - sizes.t().flatten())  # by expert and source
    last = max(0, rows - 1)
    run = torch.searchsorted(grouped_ends, number, right=True).clamp_(max=len(shift) - 1)
    direct = (number + shift.index_select(0, run)).clamp_(0, last)
    back_shift = shift.view(shape.local, shape.ranks).t().flatten()
    run = torch.searchsorted((block + ends).flatten(), number, right=True).clamp_(max=len(shift) - 1)
    back = (number - back_shift.index_select(0, run)).clamp_(0, last)
    absent = (torch.arange(shape.block, device=number.device) >= ends[:, -1:]).flatten()
    moves = Moves(direct, back, blank=number >= grouped_ends[-1], absent=absent)
    return Trees(moves, moves)


def fan(owner: Tensor, targets: int, blocks: int, room: int | None, length: int) -> Copies:
    """Copies of rows to several targets, one to each that holds one of a row's experts.

    owner: [rows, k] the target of each choice, ascending; ``targets`` for none. blocks: equal parts of the rows; each
    target gets them one after the other. room: rows to which a block is padded on its way; None: no padding. length:
    number of copies, padding included.
    """
    rows, top = owner.shape
    entry, ends = set_entries(run_starts(owner, targets), length)
    if room is None:
        row, key = floor_divided(entry, top), owner.reshape(-1).index_select(0, entry)
        leaf = places_by_target(key, row, targets, rows)
        return Copies(torch.empty_like(row).scatter_(0, leaf, row), (Bags.of(leaf, ends, padded=False),))
    chosen = entry.clamp(min=0)
    row, key = floor_divided(chosen, top), taken(owner.reshape(-1), chosen, None)
    key = key.long() * blocks + row.div(max(1, rows // blocks), rounding_mode="floor")
    layout, order, leaf = in_blocks(torch.where(entry < 0, targets * blocks, key), targets * blocks, room)
    direct, blank = layout.sources(length)
    bags = Bags.of(leaf, ends, padded=True)
    return Copies(row.index_select(0, order.index_select(0, direct)), (bags,), blank=blank)


def places_by_target(target: Tensor, row: Tensor, targets: int, rows: int) -> Tensor:
    """[entries] the place of each entry among them all by target, then row. No two have both in common."""
    cell = target.long().mul_(rows).add_(row)
    taken_cells = torch.zeros(targets * rows, dtype=torch.bool, device=cell.device).scatter_(0, cell, True)
    return taken_cells.cumsum(0).index_select(0, cell).sub_(1)


def in_blocks(key: Tensor, blocks: int, capacity: int) -> tuple[Blocks, Tensor, Tensor]:
    """Entries sorted by ``key`` [entries] into padded blocks: (layout, order, leaf of each entry); ``blocks``: none."""
    order = key.argsort(stable=True)
    counts = torch.zeros(blocks + 1, dtype=torch.int64, device=key.device)
    counts.scatter_add_(0, key, torch.ones((), dtype=torch.int64, device=key.device).expand(key.shape))
    layout = Blocks(counts[:blocks], capacity)
    return layout, order, layout.leaves(inverse(order), key)


def fan_to_all(targets: int, rows: int, like: Tensor) -> Copies:
    """A copy of each row for every target. like: [...] a tensor of the device."""
    number = arange(rows, like)
    at = (number[:, None] + arange(targets, like) * rows).flatten()
    return Copies(number.repeat(targets), (Bags.of(at, arange(rows + 1, like) * targets, padded=False),))


def hop_landing(counts: Counts, ids: Tensor, room: int | None, rows: int) -> Trees:
    """The rows that came over the last of two hops, to those of the experts.

    ids: [received, k] experts of each row, ascending. room: padded rows of a block from one source; None: no padding.
    rows: number of the experts' rows.
    """
    shape, (received, top) = counts.shape, ids.shape
    held = owners(ids, shape.experts, shape.local) == shape.rank
    pair, sums = set_entries(held, rows)
    chosen = pair.clamp(min=0)
    row, groups = floor_divided(chosen, top), shape.local * shape.ranks
    source = taken(_sources(counts, room, received), row, None)
    expert = taken(ids.reshape(-1), chosen, None).long() - shape.rank * shape.local
    key, blank = expert * shape.ranks + source, None
    if shape.capacity is None:
        if shape.bounds is not None:
            key = torch.where(pair < 0, groups, key)
        order = key.to(torch.int16 if groups < 2**15 - 1 else torch.int64).argsort(stable=True)
        leaf, direct = inverse(order), order
        if shape.bounds is not None:
            blank = pair.index_select(0, order) < 0
    else:
        layout, order, leaf = in_blocks(torch.where(pair < 0, groups, key), groups, shape.capacity)
        at, blank = layout.sources(rows)
        direct = order.index_select(0, at)
    where = torch.where(pair < 0, received * top, pair)
    back = torch.zeros(received * top + 1, dtype=torch.int64, device=ids.device).scatter_(0, where, leaf)[:-1]
    return Trees(
        Copies(row.index_select(0, direct), (Bags.of(leaf, sums, padded=shape.padded),), blank=blank),
        Moves(chosen.index_select(0, direct), back, blank=blank, absent=~held.flatten()),
    )


def _sources(counts: Counts, room: int | None, received: int) -> Tensor:
    """[received] int32 the rank that each row comes from: rows lie in blocks by the rank that passed them, and node."""
    shape = counts.shape
    node = torch.arange(shape.nodes, device=counts.table.device, dtype=torch.int32)
    passer = torch.arange(shape.per_node, device=counts.table.device, dtype=torch.int32)
    ranks = (node * shape.per_node + passer[:, None]).flatten()  # [ranks of the node, nodes]
    if room is not None:
        return ranks[:, None].expand(-1, room).reshape(-1)
    sizes = counts.of_ranks[:, shape.rank].view(shape.nodes, shape.per_node).t().flatten()
    return ranks.repeat_interleave(sizes.long(), output_size=received)
