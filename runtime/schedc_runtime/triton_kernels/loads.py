"""Loads of experts, flags of ranks, and choices beyond a capacity, in Triton: whole numbers, and the bits of the twins.

`schedc_runtime.moe.balance`, `schedc_runtime.moe.planner` and `schedc_runtime.moe.capacity` say what.

add_load    a program for each block of experts, and one for what was dropped
tally       a program for each expert, which counts all choices
note        a program for each rank's flags, and one for the rows of this rank
drop        a program for each block of choices, which compares each with all others of its expert
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_EXPERTS = 128
"""Experts of a block."""
_CHOICES = 1024
"""Choices that a program counts at once."""
_PAIRS = 64
"""Choices of a block that are compared with as many others at once."""


@triton.jit(do_not_specialize=["ranks"])
def _add_load(chosen, dropped, table, ranks, columns, EXPERTS: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    every = block == tl.num_programs(0) - 1
    loads = tl.zeros((BLOCK,), dtype=tl.int64)
    if every:
        if DROPS:
            for rank in range(ranks):
                for first in range(0, EXPERTS, BLOCK):
                    expert = first + tl.arange(0, BLOCK)
                    at = table + rank * columns + EXPERTS + expert
                    loads += tl.load(at, mask=expert < EXPERTS, other=0).to(tl.int64)
            tl.store(dropped, tl.load(dropped) + tl.sum(loads, 0))
    else:
        expert = block * BLOCK + tl.arange(0, BLOCK)
        for rank in range(ranks):
            at = table + rank * columns + expert
            loads += tl.load(at, mask=expert < EXPERTS, other=0).to(tl.int64)
            if DROPS:
                loads += tl.load(at + EXPERTS, mask=expert < EXPERTS, other=0).to(tl.int64)
        before = tl.load(chosen + expert, mask=expert < EXPERTS, other=0)
        tl.store(chosen + expert, before + loads, mask=expert < EXPERTS)


def launch_add_load(chosen: Tensor, dropped: Tensor, table: Tensor, drops: bool) -> None:
    """Add the counts of all ranks [ranks, columns] to ``chosen`` [experts] and ``dropped`` []: as the twin."""
    experts, table = len(chosen), table.contiguous()
    _add_load[(triton.cdiv(experts, _EXPERTS) + 1,)](
        chosen, dropped, table, *table.shape, EXPERTS=experts, DROPS=drops, BLOCK=_EXPERTS, **OPTIONS
    )


@triton.jit(do_not_specialize=["count"])
def _tally(index, sums, result, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    fallen = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        chosen = tl.load(index + at, mask=at < count, other=-2)
        chosen = tl.where(chosen < -2, -3 - chosen, chosen)
        fallen += (chosen == expert).to(tl.int32)
    tl.store(result + expert, tl.sum(fallen, 0).to(tl.float64))
    tl.store(result + EXPERTS + expert, tl.load(sums + expert).to(tl.float64))


def launch_tally(index: Tensor, sums: Tensor) -> Tensor:
    """[1, 2, experts] float64: choices of each expert in ``index`` [N, k], and ``sums`` [experts]: as the twin."""
    result = torch.empty(1, 2, len(sums), dtype=torch.float64, device=sums.device)
    _tally[(len(sums),)](
        index.contiguous(), sums.contiguous(), result, index.numel(), EXPERTS=len(sums), BLOCK=_CHOICES, **OPTIONS
    )
    return result


@triton.jit
def _overflows(
    table, rank, columns, EXPERTS: tl.constexpr, NODES: tl.constexpr, RANKS: tl.constexpr, PAIR: tl.constexpr,
    RAIL: tl.constexpr, NODE: tl.constexpr, HOPS: tl.constexpr, RANK_ROOM: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    LOCAL: tl.constexpr = EXPERTS // RANKS
    target, local = tl.arange(0, RANK_ROOM), tl.arange(0, ROOM)
    at = target[:, None] * LOCAL + local[None, :]
    inside = (target[:, None] < RANKS) & (local[None, :] < LOCAL)
    rows = tl.sum(tl.load(table + rank * columns + at, mask=inside, other=0), 1)
    if HOPS == 0:
        return tl.max((rows > PAIR).to(tl.int32), 0)
    sums = tl.zeros((RANK_ROOM,), dtype=tl.int32)
    for source in range(RANKS):
        sums += tl.sum(tl.load(table + source * columns + at, mask=inside, other=0), 1)
    tokens = table + rank * columns + EXPERTS
    of_ranks = tl.load(tokens + target, mask=target < RANKS, other=0)
    over = (of_ranks > NODE) | ((sums > RANKS * PAIR) & (rows > 0))
    if HOPS == 1:  # hierarchical
        of_nodes = tl.load(tokens + RANKS + target, mask=target < NODES, other=0)
        over = over | (of_nodes > RAIL)
    return tl.max(over.to(tl.int32), 0)


@triton.jit
def _note(
    table, flags, rows, now, received, columns, EXPERTS: tl.constexpr, NODES: tl.constexpr, RANKS: tl.constexpr,
    RANK: tl.constexpr, PAIR: tl.constexpr, RAIL: tl.constexpr, NODE: tl.constexpr, HOPS: tl.constexpr,
    RANK_ROOM: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    LOCAL: tl.constexpr = EXPERTS // RANKS
    rank = tl.program_id(0)
    if rank < RANKS:
        flag = tl.load(table + rank * columns + columns - 1)
        if PAIR >= 0:
            flag = flag | _overflows(
                table, rank, columns, EXPERTS, NODES, RANKS, PAIR, RAIL, NODE, HOPS, RANK_ROOM, ROOM
            ) * 16  # fmt: skip
        if flags is not None:
            flag = flag | tl.load(flags + rank)
        tl.store(now + rank, flag)
    else:
        source, local = tl.arange(0, RANK_ROOM)[:, None], tl.arange(0, ROOM)[None, :]
        at = table + source * columns + RANK * LOCAL + local
        mine = tl.load(at, mask=(source < RANKS) & (local < LOCAL), other=0).to(tl.int64)
        total = tl.sum(tl.sum(mine, 1), 0)
        if rows is not None:
            total += tl.load(rows)
        tl.store(received, total)


def launch_note(table: Tensor, flags: Tensor | None, rows: Tensor | None, shape: Sequence[int]) -> Any:
    """([ranks] flags, [1] rows): as the twin, of counts [ranks, columns]. shape: `moe.counts.Shape.numbers`."""
    experts, nodes, per_node, rank, method, _, _, pair, rail, node = shape
    ranks = nodes * per_node
    now = torch.empty(ranks, dtype=torch.int32 if pair < 0 else torch.int64, device=table.device)
    if flags is not None and flags.dtype is not now.dtype:
        return NotImplemented
    received = torch.empty(1, dtype=torch.int64, device=table.device)
    table = table.contiguous()
    _note[(ranks + 1,)](
        table, flags, rows, now, received, table.shape[1], EXPERTS=experts, NODES=nodes, RANKS=ranks, RANK=rank,
        PAIR=pair, RAIL=rail, NODE=node, HOPS=method, RANK_ROOM=triton.next_power_of_2(ranks),
        ROOM=triton.next_power_of_2(experts // ranks), **OPTIONS,
    )  # fmt: skip
    return now, received


@triton.jit
def _strength(weight, at, inside):
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit(do_not_specialize=["count", "slots"])
def _drop(index, weight, marked, kept, stay, count, slots, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    expert = tl.load(index + at, mask=inside, other=0)
    own = _strength(weight, at, inside)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, count, BLOCK):
        other = first + tl.arange(0, BLOCK)
        rival = tl.load(index + other, mask=other < count, other=0)
        earlier = other[None, :] < at[:, None]
        if WEIGHTS:
            theirs = _strength(weight, other, other < count)[None, :]
            earlier = (theirs > own[:, None]) | ((theirs == own[:, None]) & earlier)
        earlier = earlier & (rival[None, :] == expert[:, None]) & (other < count)[None, :]
        before += tl.sum(earlier.to(tl.int32), 1)
    stays = before < slots
    value = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(marked + at, tl.where(stays, expert, -3 - expert), mask=inside)
    tl.store(kept + at, value * stays.to(value.dtype), mask=inside)
    tl.store(stay + at, stays.to(tl.uint8), mask=inside)


def launch_drop(index: Tensor, weight: Tensor, slots: int, drop: str) -> Any:
    """(choices with marks, weights, which stay), all [N, k]: as the twin. drop: ``probs`` or ``position``."""
    if weight.dtype is torch.float64:
        return NotImplemented
    index, weight = index.contiguous(), weight.contiguous()
    marked, kept = torch.empty_like(index), torch.empty_like(weight)
    stay = torch.empty(index.shape, dtype=torch.bool, device=index.device)
    if index.numel():
        _drop[(triton.cdiv(index.numel(), _PAIRS),)](
            index, weight, marked, kept, stay.view(torch.uint8), index.numel(), slots, WEIGHTS=drop == "probs",
            BLOCK=_PAIRS, **OPTIONS,
        )  # fmt: skip
    return marked, kept, stay
