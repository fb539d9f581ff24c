"""Where rows go, in Triton: the lists of a flat dispatch. `schedc_runtime.moe.trees`.

plan_packing   a program for each expert, one for what was dropped, and one for the sums; each goes over all choices
plan_landing   a program for each expert here and source rank

Places follow from sums over the choices before. No order depends on which program runs first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.numbers import veiled
from schedc_runtime.triton_kernels.route_shape import Shape, counted_group_sizes

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
BLOCK = 1024
"""Choices that a program reads at once."""
UNREAD = 64
"""Entries of a bag that nobody reads, as in `moe.bags`."""


@triton.jit
def no_more(begins, first, last, end, length, UNREAD: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the begins behind rows: ``last`` from ``first`` to ``end``; then those of entries that nobody reads."""
    unread = tl.maximum(tl.cdiv(length, UNREAD), 1) - 1
    for start in range(first, end + unread, BLOCK):
        at = start + tl.arange(0, BLOCK)
        begin = tl.where(at < end, last, tl.maximum((at - end + 1) * UNREAD, last))
        tl.store(begins + at, tl.minimum(begin, length).to(tl.int64), mask=at < end + unread)


@triton.jit
def _level(places, begun, owner, before, starts, begins, room):
    """Writes where the runs of a level begin: the numbers of their first entries. Returns the runs up to each entry."""
    start = starts & (owner != before)
    counted = begun + tl.cumsum(start.to(tl.int32), 0)
    tl.store(begins + counted - 1, places.to(tl.int64), mask=start & (counted <= room))
    return start, counted


@triton.jit
def _counted(
    ids, follow, begins, bags, count, K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, UNREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = (FIRST > 0) + (SECOND > 0)
    kept, firsts, seconds = 0, 0, 0
    tl.store(begins[LEVELS], tl.zeros((), dtype=tl.int64))
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        number = tl.load(ids + at, mask=inside, other=EXPERTS).to(tl.int32)
        before = tl.load(ids + at - 1, mask=inside & (at % K != 0), other=-EXPERTS).to(tl.int32)
        held = inside & (number < EXPERTS)
        own = held if PADDED else inside
        counted = kept + tl.cumsum(own.to(tl.int32), 0)
        kept += tl.sum(own.to(tl.int32), 0)
        if FIRST > 0:
            begun, counted = _level(
                counted - 1, firsts, number // FIRST, before // FIRST, held, begins[0], bags[0] >> 4
            )
            firsts += tl.sum(begun.to(tl.int32), 0)
        if SECOND > 0:
            begun, counted = _level(
                counted - 1, seconds, number // SECOND, before // SECOND, held, begins[1], bags[1] >> 4
            )
            seconds += tl.sum(begun.to(tl.int32), 0)
        tl.store(begins[LEVELS] + at // K + 1, counted.to(tl.int64), mask=inside & (at % K == K - 1))
    length, last = count, kept
    for level in tl.static_range(LEVELS):
        runs = firsts if level == 0 else seconds
        room = bags[level] >> 4
        no_more(
            begins[level], runs, last, room + 1, length if PADDED else 1 << 30, UNREAD if PADDED else 1 << 30, BLOCK
        )
        for start in range(0, room, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(follow[level] + at, at.to(tl.int64), mask=at < room)
        length, last = room, runs
    if PADDED:
        no_more(begins[LEVELS], count // K + 1, last, count // K + 1, length, UNREAD, BLOCK)


@triton.jit(do_not_specialize=["count"])
def _plan_packing(
    ids, slots, table, token, entry, back, blank, absent, at, follow, begins, bags, count, K: tl.constexpr,
    EXPERTS: tl.constexpr, EACH: tl.constexpr, CAPACITY: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROOM: tl.constexpr, UNREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    if expert > EXPERTS:
        _counted(ids, follow, begins, bags, count, K, EXPERTS, CAPACITY >= 0, FIRST, SECOND, UNREAD, BLOCK)
    else:
        number = tl.arange(0, ROOM)
        rows = tl.load(table + number, mask=number < EXPERTS, other=0)
        before = tl.sum(tl.where(number < expert, rows, 0), 0)
        block = tl.minimum(expert // EACH, EXPERTS // EACH - 1)
        first = tl.sum(tl.where(number < block * EACH, rows, 0), 0)
        length = tl.sum(tl.where((number >= block * EACH) & (number < block * EACH + EACH), rows, 0), 0)
        kept, met = 0, before
        for start in range(0, count, BLOCK):
            choice = start + tl.arange(0, BLOCK)
            inside = choice < count
            chosen = tl.load(ids + choice, mask=inside, other=EXPERTS + 1).to(tl.int32)
            here = chosen == expert
            own = chosen < EXPERTS
            place = met + tl.cumsum(here.to(tl.int32), 0) - 1
            stood = choice - choice % K + tl.load(slots + choice, mask=here, other=0).to(tl.int32)
            if CAPACITY < 0:
                leaf, summand = place, choice
                leads = here
            else:
                leaf = block * CAPACITY + tl.minimum(tl.maximum(place - first, 0), CAPACITY - 1)
                summand = tl.where(expert < EXPERTS, kept + tl.cumsum(own.to(tl.int32), 0) - 1, place)
                leads = here & (expert < EXPERTS) & (place - first < CAPACITY)
                tl.store(absent + stood, (here & (expert == EXPERTS)).to(tl.uint8), mask=here)
            tl.store(back + stood, leaf.to(tl.int64), mask=here)
            tl.store(at + summand, tl.where(expert < EXPERTS, leaf, 0).to(tl.int64), mask=here)
            tl.store(entry + leaf, stood.to(tl.int64), mask=leads)
            tl.store(token + leaf, (choice // K).to(tl.int64), mask=leads)
            met += tl.sum(here.to(tl.int32), 0)
            kept += tl.sum(own.to(tl.int32), 0)
        if CAPACITY >= 0:  # noqa: SIM102
            if (expert < EXPERTS) & (expert % EACH == 0):
                for start in range(0, CAPACITY, BLOCK):
                    within = start + tl.arange(0, BLOCK)
                    leaf = block * CAPACITY + within
                    empty = within >= length
                    nothing = tl.zeros((BLOCK,), dtype=tl.int64)
                    tl.store(blank + leaf, empty.to(tl.uint8), mask=within < CAPACITY)
                    tl.store(entry + leaf, nothing, mask=empty & (within < CAPACITY))
                    tl.store(token + leaf, nothing, mask=empty & (within < CAPACITY))


def launch_plan_packing(
    ids: Tensor, slots: Tensor, unsorted: Tensor, table: Tensor, runs: Sequence[Tensor], bags: Sequence[int],
    numbers: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """The lists of a flat dispatch: as the twin, of choices [N, k] that lie as they are sorted. ``runs`` are unread."""
    shape, (tokens, top) = Shape.of(numbers), ids.shape
    count, groups = tokens * top, counted_group_sizes(shape)
    each, capacity = 1, -1 if shape.capacity is None else shape.capacity
    if shape.bounds is not None:
        each, capacity = shape.local, shape.block
    leaves = count if capacity < 0 else shape.experts // each * capacity
    token, entry, back, at = (numbers_of(size, ids) for size in (leaves, leaves, count, count))
    blank, absent = (flags_of(size, ids) if capacity >= 0 else None for size in (leaves, count))
    rooms = (count, *bags)
    follow = tuple(numbers_of(room, ids) for room in bags)
    unread = [unread_of(room) if capacity >= 0 else 0 for room in rooms]
    lengths = [*(room + 1 for room in bags), tokens + 1]
    begins = tuple(numbers_of(length + more, ids) for length, more in zip(lengths, unread, strict=True))
    first, second = (*groups, 0, 0)[:2]
    _plan_packing[(shape.experts + 2,)](
        ids.contiguous(), slots.contiguous(), table[shape.rank].contiguous(), token, entry, back, as_bytes(blank),
        as_bytes(absent), at, follow or (at,), begins, veiled(bags or (0,)), count, K=top, EXPERTS=shape.experts,
        EACH=each, CAPACITY=capacity, FIRST=first, SECOND=second, ROOM=triton.next_power_of_2(shape.experts),
        UNREAD=UNREAD, BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip
    ats = (at, *follow)
    levels = [part for pair in zip(ats, begins, strict=True) for part in pair]
    return [token, entry, back, *([] if blank is None or absent is None else [blank, absent]), *levels]


def unread_of(length: int) -> int:
    """The number of bags that nobody reads, of ``length`` entries."""
    return max(-(-length // UNREAD), 1) - 1


def numbers_of(count: int, like: Tensor) -> Tensor:
    """[count] int64, not filled."""
    return torch.empty(count, dtype=torch.int64, device=like.device)


def flags_of(count: int, like: Tensor) -> Tensor:
    """[count] bool, not filled."""
    return torch.empty(count, dtype=torch.bool, device=like.device)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """[count] uint8 of [count] bool."""
    return None if mask is None else mask.view(torch.uint8)


@triton.jit(do_not_specialize=["rows"])
def _plan_landing(
    table, direct, back, ends, blank, absent, rows, columns, RANKS: tl.constexpr, LOCAL: tl.constexpr,
    CAPACITY: tl.constexpr, PAIR: tl.constexpr, RANK_ROOM: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    source, expert = tl.program_id(0) // LOCAL, tl.program_id(0) % LOCAL
    if CAPACITY >= 0:
        size = tl.zeros((), dtype=tl.int32) + CAPACITY
        come, go = (source * LOCAL + expert) * CAPACITY, (expert * RANKS + source) * CAPACITY
    else:
        rank, local = tl.arange(0, RANK_ROOM)[:, None], tl.arange(0, ROOM)[None, :]
        inside = (rank < RANKS) & (local < LOCAL)
        whole = tl.load(table + rank * columns + local, mask=inside, other=0)
        sizes = whole
        if PAIR >= 0:
            ended_at = tl.cumsum(whole, 1)
            sizes = tl.minimum(ended_at, PAIR) - tl.minimum(ended_at - whole, PAIR)
        size = _whole(tl.where((rank == source) & (local == expert), sizes, 0))
        go = _whole(tl.where((local < expert) | ((local == expert) & (rank < source)), sizes, 0))
        come = _whole(tl.where((rank == source) & (local < expert), sizes, 0))
        come += source * PAIR if PAIR >= 0 else _whole(tl.where(rank < source, sizes, 0))
        if source == 0:
            end = _whole(tl.where(local <= expert, whole, 0))
            tl.store(ends + expert, tl.minimum(end, rows).to(tl.int32))
        if PAIR >= 0:  # noqa: SIM102
            if expert == LOCAL - 1:
                filled = _whole(tl.where(rank == source, sizes, 0))
                behind = source * PAIR - _whole(tl.where(rank < source, sizes, 0)) + _whole(sizes)
                for start in range(filled, PAIR, BLOCK):
                    within = start + tl.arange(0, BLOCK)
                    nothing = tl.zeros((BLOCK,), dtype=tl.int64)
                    tl.store(back + source * PAIR + within, nothing, mask=within < PAIR)
                    tl.store(absent + source * PAIR + within, (nothing + 1).to(tl.uint8), mask=within < PAIR)
                    tl.store(direct + behind + within - filled, nothing, mask=within < PAIR)
                    tl.store(blank + behind + within - filled, (nothing + 1).to(tl.uint8), mask=within < PAIR)
    for start in range(0, size, BLOCK):
        within = start + tl.arange(0, BLOCK)
        tl.store(direct + go + within, (come + within).to(tl.int64), mask=within < size)
        tl.store(back + come + within, (go + within).to(tl.int64), mask=within < size)
        if PAIR >= 0:
            nothing = tl.zeros((BLOCK,), dtype=tl.uint8)
            tl.store(blank + go + within, nothing, mask=within < size)
            tl.store(absent + come + within, nothing, mask=within < size)


@triton.jit
def _whole(tile):
    return tl.sum(tl.sum(tile, 1), 0)


def launch_plan_landing(table: Tensor, rows: int, numbers: Sequence[int]) -> list[Tensor]:
    """The lists of rows that a flat dispatch brings: as the twin, from everyone's counts [ranks, columns]."""
    shape = Shape.of(numbers)
    direct, back = numbers_of(rows, table), numbers_of(rows, table)
    ends = torch.empty(shape.local, dtype=torch.int32, device=table.device) if shape.capacity is None else None
    bounded = shape.bounds is not None
    blank, absent = (flags_of(rows, table) if bounded else None for _ in range(2))
    table = table.contiguous()
    _plan_landing[(shape.experts,)](
        table[:, shape.rank * shape.local :], direct, back, ends, as_bytes(blank), as_bytes(absent), rows,
        table.shape[1], RANKS=shape.ranks, LOCAL=shape.local, CAPACITY=-1 if shape.capacity is None else shape.capacity,
        PAIR=shape.block if bounded else -1, RANK_ROOM=triton.next_power_of_2(shape.ranks),
        ROOM=triton.next_power_of_2(shape.local), BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip
    return [part for part in (direct, back, ends, blank, absent) if part is not None]
