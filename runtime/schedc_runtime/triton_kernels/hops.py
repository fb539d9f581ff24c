"""Where rows go over two hops, in Triton. `schedc_runtime.moe.trees` says what.

plan_rail_packing, plan_relay   a program for each block of copies, one for the sums, and those of gate weights
plan_hop_landing                a program for each expert here and source rank, and one for the sums

Each program goes over all choices. Places follow from sums over the choices before.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.plans import (
    BLOCK,
    OPTIONS,
    UNREAD,
    as_bytes,
    flags_of,
    no_more,
    numbers_of,
    unread_of,
)
from schedc_runtime.triton_kernels.route_shape import Shape


@triton.jit
def _owner(number, FIRST: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr):
    inside = (number >= FIRST) & (number < FIRST + EACH * PARTS)
    return tl.where(inside, (number - FIRST) // EACH, PARTS)


@triton.jit
def _starts(
    ids, at, inside, WIDTH: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """The target of each choice, and whether it is the first of its row there. ALL: rows go to every target."""
    if ALL:
        owner, start = at % WIDTH, inside
    else:
        owner = _owner(tl.load(ids + at, mask=inside, other=-1).to(tl.int32), FIRST, EACH, PARTS)
        within = at % WIDTH != 0
        before = _owner(tl.load(ids + at - 1, mask=inside & within, other=-1).to(tl.int32), FIRST, EACH, PARTS)
        start = inside & (owner < PARTS) & ((within == 0) | (owner != before))
    return owner, start


@triton.jit
def _fan(
    key, ids, row, at, begins, blank, count, length, PARTS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr,
    EACH: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr, PAD: tl.constexpr, UNREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    target, block, sums = key // BLOCKS, key % BLOCKS, key == PARTS * BLOCKS
    rows = count // WIDTH
    of_block = tl.maximum(rows // BLOCKS, 1)
    first = 0
    if PAD < 0:
        for start in range(0, count, BLOCK):
            choice = start + tl.arange(0, BLOCK)
            owner, begun = _starts(ids, choice, choice < count, WIDTH, FIRST, EACH, PARTS, ALL)
            first += tl.sum((begun & (owner < target)).to(tl.int32), 0)
    copies, met = 0, 0
    if sums:
        tl.store(begins, tl.zeros((), dtype=tl.int64))
    for start in range(0, count, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        owner, begun = _starts(ids, choice, choice < count, WIDTH, FIRST, EACH, PARTS, ALL)
        counted = copies + tl.cumsum(begun.to(tl.int32), 0)
        if sums:
            end = counted if PAD < 0 else tl.minimum(counted, length)
            tl.store(
                begins + choice // WIDTH + 1, end.to(tl.int64), mask=(choice < count) & (choice % WIDTH == WIDTH - 1)
            )
        here = begun & (owner == target) & (counted <= length)
        if BLOCKS > 1:
            here = here & (choice // WIDTH // of_block == block)
        place = met + tl.cumsum(here.to(tl.int32), 0) - 1
        leaf = first + place if PAD < 0 else key * PAD + tl.minimum(place, PAD - 1)
        tl.store(at + counted - 1, leaf.to(tl.int64), mask=here)
        leads = here if PAD < 0 else here & (place < PAD)
        tl.store(row + leaf, (choice // WIDTH).to(tl.int64), mask=leads)
        copies += tl.sum(begun.to(tl.int32), 0)
        met += tl.sum(here.to(tl.int32), 0)
    if PAD >= 0:
        nothing = tl.zeros((BLOCK,), dtype=tl.int64)
        if sums:
            no_more(begins, rows + 1, copies, rows + 1, length, UNREAD, BLOCK)
            for start in range(tl.minimum(copies, length), length, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                tl.store(at + entry, nothing, mask=entry < length)
        else:
            _emptied(blank, row, row, key * PAD, met, PAD, BLOCK)


@triton.jit
def _emptied(blank, one, other, first, filled, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Says which entries of a block of PAD are padding, and writes zeros there."""
    nothing = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, PAD, BLOCK):
        within = start + tl.arange(0, BLOCK)
        empty = (within >= filled) & (within < PAD)
        tl.store(blank + first + within, empty.to(tl.uint8), mask=within < PAD)
        tl.store(one + first + within, nothing, mask=empty)
        tl.store(other + first + within, nothing, mask=empty)


@triton.jit(do_not_specialize=["tokens", "length"])
def _plan_fan(
    ids, slots, direct, back, row, at, begins, blank, tokens, length, K: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr,
    PAD: tl.constexpr, UNREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program <= PARTS * BLOCKS:
        _fan(
            program, ids, row, at, begins, blank, tokens * WIDTH, length, PARTS, WIDTH, FIRST, EACH, ALL, BLOCKS, PAD,
            UNREAD, BLOCK,
        )  # fmt: skip
    elif slots is not None:
        choice = (program - PARTS * BLOCKS - 1) * BLOCK + tl.arange(0, BLOCK)
        inside = choice < tokens * K
        stood = choice - choice % K + tl.load(slots + choice, mask=inside, other=0)
        tl.store(direct + choice, stood, mask=inside)
        tl.store(back + stood, choice.to(tl.int64), mask=inside)


def _fanned(
    ids: Tensor, slots: Tensor | None, parts: int, first: int, each: int, blocks: int, pad: int | None, length: int
) -> list[Tensor]:
    """The lists of copies to ``parts`` targets, behind those of gate weights where there are ``slots``.

    each: experts of a target, from ``first`` on; 0: every target gets every row.
    """
    tokens, top = ids.shape
    count = tokens * top
    leaves = length if pad is None else parts * blocks * pad
    row, at = numbers_of(leaves, ids), numbers_of(length, ids)
    begins = numbers_of(tokens + 1 + (0 if pad is None else unread_of(length)), ids)
    blank = None if pad is None else flags_of(leaves, ids)
    gates = [] if slots is None else [numbers_of(count, ids), numbers_of(count, ids)]
    direct, back = gates or (None, None)
    _plan_fan[(parts * blocks + 1 + (triton.cdiv(count, BLOCK) if gates else 0),)](
        ids.contiguous(), None if slots is None else slots.contiguous(), direct, back, row, at, begins, as_bytes(blank),
        tokens, length, K=top, PARTS=parts, WIDTH=top if each else parts, FIRST=first, EACH=max(each, 1), ALL=not each,
        BLOCKS=blocks, PAD=-1 if pad is None else pad, UNREAD=UNREAD, BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip
    return [*gates, row, at, begins, *([] if blank is None else [blank])]


def launch_plan_rail_packing(ids: Tensor, slots: Tensor, length: int, numbers: Sequence[int]) -> list[Tensor]:
    """The lists of copies that go over the rail, and of gate weights: as the twin, of choices [N, k]."""
    shape = Shape.of(numbers)
    room, _ = shape.rooms
    if shape.method == "allgather":
        return _fanned(ids, slots, shape.nodes, 0, 0, 1, None if room == len(ids) else room, length)
    return _fanned(ids, slots, shape.nodes, 0, shape.local * shape.per_node, 1, room, length)


def launch_plan_relay(ids: Tensor, length: int, numbers: Sequence[int]) -> list[Tensor]:
    """The lists of copies that go on inside the node: as the twin, of experts [rows, k]."""
    shape = Shape.of(numbers)
    (_, room), (node, _) = shape.rooms, shape.place
    blocks = 1 if room is None else shape.nodes
    return _fanned(ids, None, shape.per_node, node * shape.per_node * shape.local, shape.local, blocks, room, length)


@triton.jit
def _source(row, PASS: tl.constexpr, NODES: tl.constexpr, PER_NODE: tl.constexpr):
    """The rank that a row comes from, where blocks of PASS rows lie by the rank that passed them, and node."""
    block = row // PASS
    return (block % NODES) * PER_NODE + block // NODES


@triton.jit
def _ends(table, begins, ends, rows, columns, RANKS: tl.constexpr, RANK: tl.constexpr, LOCAL: tl.constexpr,
    RANK_ROOM: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    rank, local = tl.arange(0, RANK_ROOM)[:, None], tl.arange(0, ROOM)
    at = table + rank * columns + RANK * LOCAL + local[None, :]
    sizes = tl.sum(tl.load(at, mask=(rank < RANKS) & (local < LOCAL)[None, :], other=0), 0)
    tl.store(ends + local, tl.minimum(tl.cumsum(sizes, 0), rows), mask=local < LOCAL)
    tl.store(begins, tl.zeros((), dtype=tl.int64))


@triton.jit
def _exact(
    table, expert, source, columns, EXPERTS: tl.constexpr, NODES: tl.constexpr, PER_NODE: tl.constexpr,
    RANK: tl.constexpr, RANK_ROOM: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """(rows here before those of an expert and source, first row that came from the source, row behind its last)."""
    LOCAL: tl.constexpr = EXPERTS // (NODES * PER_NODE)
    rank, local = tl.arange(0, RANK_ROOM), tl.arange(0, ROOM)[None, :]
    inside = (rank < NODES * PER_NODE)[:, None] & (local < LOCAL)
    sizes = tl.load(table + rank[:, None] * columns + RANK * LOCAL + local, mask=inside, other=0)
    earlier = (local < expert) | ((local == expert) & (rank < source)[:, None])
    passed = tl.load(table + rank * columns + EXPERTS + RANK, mask=rank < NODES * PER_NODE, other=0)
    place, own = rank % PER_NODE * NODES + rank // PER_NODE, source % PER_NODE * NODES + source // PER_NODE
    low = tl.sum(tl.where(place < own, passed, 0), 0)
    high = low + tl.sum(tl.where(place == own, passed, 0), 0)
    return tl.sum(tl.sum(tl.where(earlier, sizes, 0), 1), 0), low, high


@triton.jit
def _lesser(
    ids, count, rows, key, K: tl.constexpr, EXPERTS: tl.constexpr, NODES: tl.constexpr, PER_NODE: tl.constexpr,
    RANK: tl.constexpr, PASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many rows here are of an expert and source before ``key``."""
    LOCAL: tl.constexpr = EXPERTS // (NODES * PER_NODE)
    first, held = 0, 0
    for start in range(0, count, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        number = tl.load(ids + choice, mask=choice < count, other=EXPERTS).to(tl.int32)
        own = number // LOCAL == RANK
        counted = held + tl.cumsum(own.to(tl.int32), 0)
        there = (number - RANK * LOCAL) * (NODES * PER_NODE) + _source(choice // K, PASS, NODES, PER_NODE)
        first += tl.sum((own & (counted <= rows) & (there < key)).to(tl.int32), 0)
        held += tl.sum(own.to(tl.int32), 0)
    return first


@triton.jit
def _nobody(at, entry, row, blank, first, rows, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the entries from ``first`` on, which are padding. With a capacity padding lies in each block instead."""
    for start in range(first, rows, BLOCK):
        leaf = start + tl.arange(0, BLOCK)
        nothing = tl.zeros((BLOCK,), dtype=tl.int64)
        tl.store(at + leaf, nothing, mask=leaf < rows)
        if CAPACITY < 0:
            tl.store(entry + leaf, nothing, mask=leaf < rows)
            tl.store(row + leaf, nothing, mask=leaf < rows)
            tl.store(blank + leaf, (nothing + 1).to(tl.uint8), mask=leaf < rows)


@triton.jit(do_not_specialize=["count", "rows"])
def _plan_hop_landing(
    ids, table, row, entry, back, absent, at, begins, ends, blank, count, rows, columns, K: tl.constexpr,
    EXPERTS: tl.constexpr, NODES: tl.constexpr, PER_NODE: tl.constexpr, RANK: tl.constexpr, CAPACITY: tl.constexpr,
    PASS: tl.constexpr, RANK_ROOM: tl.constexpr, ROOM: tl.constexpr, UNREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    RANKS: tl.constexpr = NODES * PER_NODE
    LOCAL: tl.constexpr = EXPERTS // RANKS
    key = tl.program_id(0)
    expert, source, sums = key // RANKS, key % RANKS, key == EXPERTS
    first, low, high = 0, 0, 0
    if sums:
        _ends(table, begins, ends, rows, columns, RANKS, RANK, LOCAL, RANK_ROOM, ROOM)
    elif PASS < 0:
        first, low, high = _exact(table, expert, source, columns, EXPERTS, NODES, PER_NODE, RANK, RANK_ROOM, ROOM)
    elif CAPACITY < 0:
        first = _lesser(ids, count, rows, key, K, EXPERTS, NODES, PER_NODE, RANK, PASS, BLOCK)
    held, met = 0, 0
    for start in range(0, count, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        inside = choice < count
        number = tl.load(ids + choice, mask=inside, other=EXPERTS).to(tl.int32)
        own = number // LOCAL == RANK
        counted = held + tl.cumsum(own.to(tl.int32), 0)
        if sums:
            end = counted if PASS < 0 else tl.minimum(counted, rows)
            tl.store(begins + choice // K + 1, end.to(tl.int64), mask=inside & (choice % K == K - 1))
            tl.store(absent + choice, (own == 0).to(tl.uint8), mask=inside)
            tl.store(back + choice, choice.to(tl.int64) * 0, mask=inside & ((own == 0) | (counted > rows)))
        here = own & (counted <= rows) & (number == RANK * LOCAL + expert)
        if PASS < 0:
            here = here & (choice // K >= low) & (choice // K < high)
        else:
            here = here & (_source(choice // K, PASS, NODES, PER_NODE) == source)
        place = met + tl.cumsum(here.to(tl.int32), 0) - 1
        leaf = first + place if CAPACITY < 0 else key * CAPACITY + tl.minimum(place, CAPACITY - 1)
        leads = here if CAPACITY < 0 else here & (place < CAPACITY)
        tl.store(back + choice, leaf.to(tl.int64), mask=here)
        tl.store(at + counted - 1, leaf.to(tl.int64), mask=here)
        tl.store(entry + leaf, choice.to(tl.int64), mask=leads)
        tl.store(row + leaf, (choice // K).to(tl.int64), mask=leads)
        if (PASS >= 0) & (CAPACITY < 0):
            tl.store(blank + leaf, tl.zeros((BLOCK,), dtype=tl.uint8), mask=here)
        held += tl.sum(own.to(tl.int32), 0)
        met += tl.sum(here.to(tl.int32), 0)
    if PASS >= 0:
        if sums:
            no_more(begins, count // K + 1, held, count // K + 1, rows, UNREAD, BLOCK)
            _nobody(at, entry, row, blank, tl.minimum(held, rows), rows, CAPACITY, BLOCK)
        elif CAPACITY >= 0:
            _emptied(blank, entry, row, key * CAPACITY, met, CAPACITY, BLOCK)


def launch_plan_hop_landing(ids: Tensor, table: Tensor, rows: int, numbers: Sequence[int]) -> list[Tensor]:
    """The lists of rows that came over the last of two hops: as the twin, of their experts [received, k]."""
    shape, (received, top) = Shape.of(numbers), ids.shape
    row, entry, at = (numbers_of(rows, ids) for _ in range(3))
    back, absent = numbers_of(received * top, ids), flags_of(received * top, ids)
    begins = numbers_of(received + 1 + (unread_of(rows) if shape.padded else 0), ids)
    ends = torch.empty(shape.local, dtype=torch.int32, device=ids.device)
    blank = flags_of(rows, ids) if shape.padded else None
    (_, room), table = shape.rooms, table.contiguous()
    _plan_hop_landing[(shape.experts + 1,)](
        ids.contiguous(), table, row, entry, back, absent.view(torch.uint8), at, begins, ends, as_bytes(blank),
        received * top, rows, table.shape[1], K=top, EXPERTS=shape.experts, NODES=shape.nodes, PER_NODE=shape.per_node,
        RANK=shape.rank, CAPACITY=-1 if shape.capacity is None else shape.capacity, PASS=-1 if room is None else room,
        RANK_ROOM=triton.next_power_of_2(shape.ranks), ROOM=triton.next_power_of_2(shape.local), UNREAD=UNREAD,
        BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip
    return [row, entry, back, absent, at, begins, ends, *([] if blank is None else [blank])]
