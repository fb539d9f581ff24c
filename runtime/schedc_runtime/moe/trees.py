"""Makes the trees of a route by index arithmetic on the device, from a rank's own rows and everyone's counts.

    flat      leaves: (token, expert) by expert, token     sums: by rank, by node, by token
    fan       leaves: (target, row) by target, row         sums: by row, targets upwards
    landing   leaves: (expert, source rank, token)         sums: by row, experts upwards

Lists have lengths that are known: exact ones from the joined sizes, or those of padded blocks. Each function
whose name begins with `_plan` is the twin of an operation of torch. The function behind it makes trees of such lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.kernels.library import operation
from schedc_runtime.moe.bags import Bags, Copies, Moves, Take, Tree, ended
from schedc_runtime.moe.counts import Choices, Counts, Runs, Shape, floor_divided, owners, run_starts, runs


class Trees(NamedTuple):
    """The trees of rows and of gate weights."""

    rows: Tree
    gates: Tree


class Landing(NamedTuple):
    """The trees to the rows of the experts. ends: [experts] as `RowGroups`; None where all have as many rows."""

    rows: Tree
    gates: Moves
    ends: Tensor | None


def taken(numbers: Tensor, index: Tensor) -> Tensor:
    """[index, ...] the ``numbers`` [rows, ...] at ``index``. Without any they are zeros: each index is then padding."""
    return numbers.index_select(0, index) if len(numbers) else numbers.new_zeros(len(index), *numbers.shape[1:])


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


def _plan_packing(
    ids: Tensor, slots: Tensor, unsorted: Tensor, table: Tensor, begun: Sequence[Tensor], bags: Sequence[int],
    numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    shape, (tokens, top) = Shape.of(numbers), ids.shape
    counts = Counts(table, shape)
    own = runs(ids, shape) if shape.padded else Runs.listed(begun)
    experts = unsorted.flatten()
    order = experts.argsort(stable=True)
    place = inverse(order)
    if not shape.padded:
        at = place.view(tokens, top).gather(1, slots).flatten()
        return [floor_divided(order, top), order, place, *flat_levels(at, None, own, bags, (tokens, top))]
    if shape.capacity is not None:
        layout, block = Blocks(counts.rows[shape.rank], shape.capacity), experts.long()
    else:
        layout, block = Blocks(counts.by_rank[shape.rank], shape.block), floor_divided(experts, shape.local).long()
    sorted_at, blank = layout.sources(tokens * top)
    leaf = layout.leaves(place, block)
    kept = ids < shape.experts
    at = leaf.view(tokens, top).gather(1, slots).flatten()
    entries, ends = set_entries(kept, tokens * top)
    at = taken(at, entries.clamp(min=0)).masked_fill_(entries < 0, 0)
    levels = flat_levels(at, (kept.flatten().cumsum(0) - 1, ends), own, bags, (tokens, top))
    chosen = taken(order, sorted_at).masked_fill_(blank, 0)
    return [floor_divided(chosen, top), chosen, leaf, blank, experts >= shape.experts, *levels]


_packing = operation(
    "plan_packing(Tensor ids, Tensor slots, Tensor unsorted, Tensor table, Tensor[] runs, int[] bags, int[] shape)"
    " -> Tensor[]",
    _plan_packing,
    "plans:launch_plan_packing",
)


def flat_packing(choices: Choices, counts: Counts, own: Sequence[Tensor], bags: Sequence[int]) -> Trees:
    """The copies of tokens that a flat dispatch sends. own: [levels * 3] `Runs`. bags: number of sums of each level."""
    shape = counts.shape
    lists = _packing(choices.ids, choices.slots, choices.unsorted, counts.table, own, bags, shape.numbers)
    token, entry, back, *rest = lists
    blank, absent, *rest = rest if shape.padded else (None, None, *rest)
    levels = bags_of(rest, (*bags, len(choices.ids)))
    return Trees(Copies(Take(token, blank), levels), Moves(Take(entry, blank), Take(back, absent)))


def bags_of(lists: Sequence[Tensor], rows: Sequence[int]) -> tuple[Bags, ...]:
    """The bags of each level. lists: [2 * levels] entries and begins of each level in turn. rows: of each level."""
    return tuple(map(Bags, lists[::2], lists[1::2], rows))


def reordered(slots: Tensor) -> Tensor:
    """[N * k] the gate weights of a rank in the order of its choices. slots: [N, k] see `Choices`."""
    tokens, top = slots.shape
    return (arange(tokens, slots)[:, None] * top + slots).flatten()


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
) -> list[Tensor]:
    """The entries and begins of the sums of a flat combine, by level.

    at: [entries] the leaf of each kept choice, by token and expert. kept: ([N * k], [N + 1]) the number of each kept
    choice, and how many stand before each token; None: all are kept. shape: (N, k).
    """
    tokens, top = shape
    places, ends = kept or (arange(tokens * top, at), arange(tokens + 1, at) * top)
    last, levels = ends[-1], list[Tensor]()
    for start, counted, runs_begun, room in zip(*own, bags, strict=True):
        table = last.expand(room + 2).clone()
        table.scatter_(0, (counted * start).flatten(), places)  # entry 0 takes what begins no run
        levels += ended(at, table[1:], padded=kept is not None)
        at, places, last = arange(room, at), counted.flatten() - 1, runs_begun
        ends = functional.pad(counted[:, -1], (1, 0))
    return [*levels, *ended(at, ends, padded=kept is not None)]


def _plan_landing(table: Tensor, rows: int, numbers: Sequence[int]) -> list[Tensor]:
    shape = Shape.of(numbers)
    counts = Counts(table, shape)
    if shape.capacity is not None:
        block = torch.arange(rows, device=table.device).view(shape.ranks, shape.local, shape.capacity)
        direct = block.transpose(0, 1).reshape(-1)
        return [direct, inverse(direct)]
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
    return [here.add_(number), number - there, counts.ends(rows)]


_landing = operation(
    "plan_landing(Tensor table, int rows, int[] shape) -> Tensor[]", _plan_landing, "plans:launch_plan_landing"
)


def flat_landing(counts: Counts, rows: int) -> Landing:
    """The rows that a flat dispatch brings, sorted by source and expert, to those of the experts.

    rows: their number.
    """
    direct, back, *rest = _landing(counts.table, rows, counts.shape.numbers)
    ends, blank, absent = (*rest, None, None, None)[:3]
    moves = Moves(Take(direct, blank), Take(back, absent))
    return Landing(moves, moves, ends)


def with_borrowed_apart(landing: Landing, rows: int, own: int) -> Landing:
    """The rows of ``landing`` [rows] with those of borrowed experts, behind the first ``own``, from ``rows`` on.

    The host then knows where they begin, and the device how many there are. Ends of borrowed experts count from there.
    """
    assert landing.ends is not None
    mine, place = landing.ends[own - 1], arange(2 * rows, landing.ends)
    before = torch.where(place < rows, place, place - rows + mine)
    nobody = (before >= rows) | ((place < rows) & (place >= mine))
    before = before.clamp_(max=max(0, rows - 1))

    def apart(copies: Take) -> Take:
        assert copies.blank is not None
        return Take(taken(copies.at, before), taken(copies.blank, before) | nobody)

    ends, (back, absent) = torch.cat((landing.ends[:own], landing.ends[own:] - mine)), landing.gates.back
    gates = Moves(apart(landing.gates.copies), Take(torch.where(back < mine, back, back - mine + rows), absent))
    if not isinstance(landing.rows, Copies):
        return Landing(gates, gates, ends)
    ((at, offsets, arrived),) = ((bags.at, bags.offsets, bags.rows) for bags in landing.rows.levels)
    sums = Bags(torch.where(at < mine, at, at - mine + rows), offsets, arrived)
    return Landing(Copies(apart(landing.rows.copies), (sums,)), gates, ends)


def bounded_landing(counts: Counts, rows: int) -> list[Tensor]:
    """As `flat_landing`, from blocks of one size whose filled parts the device alone knows; padding comes last.

    Lists are [rows] row, [arrived] place, [experts] ends, [rows] and [arrived] what is padding.
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
    blank = number >= grouped_ends[-1]
    return [direct.masked_fill_(blank, 0), back.masked_fill_(absent, 0), counts.ends(rows), blank, absent]


def fan(owner: Tensor, targets: int, blocks: int, room: int | None, length: int) -> list[Tensor]:
    """Copies of rows to several targets, one to each that holds one of a row's experts: [rows, entries, begins, blank].

    owner: [rows, k] the target of each choice, ascending; ``targets`` for none. blocks: equal parts of the rows; each
    target gets them one after the other. room: rows to which a block is padded on its way; None: no padding, and no
    list of what is blank. length: number of copies, padding included.
    """
    rows, top = owner.shape
    entry, ends = set_entries(run_starts(owner, targets), length)
    if room is None:
        row, key = floor_divided(entry, top), owner.reshape(-1).index_select(0, entry)
        leaf = places_by_target(key, row, targets, rows)
        return [torch.empty_like(row).scatter_(0, leaf, row), *ended(leaf, ends, padded=False)]
    chosen = entry.clamp(min=0)
    row, key = floor_divided(chosen, top), taken(owner.reshape(-1), chosen)
    key = key.long() * blocks + row.div(max(1, rows // blocks), rounding_mode="floor")
    layout, order, leaf = in_blocks(torch.where(entry < 0, targets * blocks, key), targets * blocks, room)
    direct, blank = layout.sources(length)
    copied, at = row.index_select(0, order.index_select(0, direct)), leaf.masked_fill_(entry < 0, 0)
    return [copied.masked_fill_(blank, 0), *ended(at, ends, padded=True), blank]


def _plan_rail(ids: Tensor, length: int, numbers: Sequence[int]) -> list[Tensor]:
    shape, tokens = Shape.of(numbers), len(ids)
    room, _ = shape.rooms
    if shape.method != "allgather":
        return fan(owners(ids, shape.experts, shape.local * shape.per_node), shape.nodes, 1, room, length)
    if room in (None, tokens):
        return fan_to_all(shape.nodes, tokens, ids)
    return fan(arange(shape.nodes, ids).expand(tokens, -1), shape.nodes, 1, room, length)


def _plan_rail_packing(ids: Tensor, slots: Tensor, length: int, numbers: Sequence[int]) -> list[Tensor]:
    direct = reordered(slots)
    return [direct, inverse(direct), *_plan_rail(ids, length, numbers)]


_rail_packing = operation(
    "plan_rail_packing(Tensor ids, Tensor slots, int length, int[] shape) -> Tensor[]",
    _plan_rail_packing,
    "hops:launch_plan_rail_packing",
)


def rail_packing(choices: Choices, shape: Shape, length: int) -> Trees:
    """The copies of tokens that go over the rail, and of their gate weights. length: number of copies."""
    direct, back, *lists = _rail_packing(choices.ids, choices.slots, length, shape.numbers)
    return Trees(_fanned(lists, len(choices.ids)), Moves(Take(direct), Take(back)))


def _plan_relay(ids: Tensor, length: int, numbers: Sequence[int]) -> list[Tensor]:
    shape = Shape.of(numbers)
    (_, room), (node, _) = shape.rooms, shape.place
    owner = owners(ids, shape.experts, shape.local, node * shape.per_node * shape.local, shape.per_node)
    return fan(owner, shape.per_node, 1 if room is None else shape.nodes, room, length)


_relay = operation("plan_relay(Tensor ids, int length, int[] shape) -> Tensor[]", _plan_relay, "hops:launch_plan_relay")


def relay_tree(ids: Tensor, shape: Shape, length: int) -> Copies:
    """The copies of rows with experts ``ids`` [rows, k] that go on inside the node. length: their number."""
    return _fanned(_relay(ids, length, shape.numbers), len(ids))


def _fanned(lists: Sequence[Tensor], rows: int) -> Copies:
    row, entries, begins, *blank = lists
    return Copies(Take(row, *blank), (Bags(entries, begins, rows),))


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


def fan_to_all(targets: int, rows: int, like: Tensor) -> list[Tensor]:
    """A copy of each row for every target: as `fan`. like: [...] a tensor of the device."""
    number = arange(rows, like)
    at = (number[:, None] + arange(targets, like) * rows).flatten()
    return [number.repeat(targets), at, arange(rows + 1, like) * targets]


def _plan_hop_landing(ids: Tensor, table: Tensor, rows: int, numbers: Sequence[int]) -> list[Tensor]:
    shape, (received, top) = Shape.of(numbers), ids.shape
    counts, (_, room) = Counts(table, shape), shape.rooms
    held = owners(ids, shape.experts, shape.local) == shape.rank
    pair, sums = set_entries(held, rows)
    chosen = pair.clamp(min=0)
    row, groups = floor_divided(chosen, top), shape.local * shape.ranks
    source = taken(_sources(counts, room, received), row)
    expert = taken(ids.reshape(-1), chosen).long() - shape.rank * shape.local
    key = expert * shape.ranks + source
    blank: list[Tensor] = []
    if shape.capacity is None:
        if shape.bounds is not None:
            key = torch.where(pair < 0, groups, key)
        order = key.to(torch.int16 if groups < 2**15 - 1 else torch.int64).argsort(stable=True)
        leaf, direct = inverse(order), order
        if shape.bounds is not None:
            blank = [pair.index_select(0, order) < 0]
    else:
        layout, order, leaf = in_blocks(torch.where(pair < 0, groups, key), groups, shape.capacity)
        at, empty = layout.sources(rows)
        direct, blank = order.index_select(0, at), [empty]
    where = torch.where(pair < 0, received * top, pair)
    back = torch.zeros(received * top + 1, dtype=torch.int64, device=ids.device).scatter_(0, where, leaf)[:-1]
    copied = [row.index_select(0, direct), chosen.index_select(0, direct)]
    if shape.padded:
        copied, leaf = [part.masked_fill_(blank[0], 0) for part in copied], leaf.masked_fill_(pair < 0, 0)
    return [*copied, back, ~held.flatten(), *ended(leaf, sums, padded=shape.padded), counts.ends(rows), *blank]


_hop_landing = operation(
    "plan_hop_landing(Tensor ids, Tensor table, int rows, int[] shape) -> Tensor[]",
    _plan_hop_landing,
    "hops:launch_plan_hop_landing",
)


def hop_landing(counts: Counts, ids: Tensor, rows: int) -> Landing:
    """The rows that came over the last of two hops, to those of the experts.

    ids: [received, k] experts of each row, ascending. rows: number of the experts' rows.
    """
    lists = _hop_landing(ids, counts.table, rows, counts.shape.numbers)
    row, entry, back, absent, entries, begins, ends, *blank = lists
    moves = Moves(Take(entry, *blank), Take(back, absent))
    levels = (Bags(entries, begins, len(ids)),)
    return Landing(Copies(Take(row, *blank), levels), moves, None if counts.shape.capacity is not None else ends)


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
