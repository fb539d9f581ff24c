"""Choices of experts in Triton. `schedc_runtime.moe.router` and `schedc_runtime.moe.counts` say what.

choose    a program for each token. Its keys are those of the twin: bits of the score, and below them the id
count     programs for blocks of tokens, which sort a token's choices, and one for each number that a rank tells
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False}
_ID_BITS = 20
_LANES = 256
"""Keys that a warp holds."""
_TOKENS = 32
"""Tokens of a block."""


@triton.jit
def _key(value, below):
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # 0.0 makes -0.0 equal to 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 20) + below


@triton.jit
def _value(key):
    rising = (key >> 20).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(
    scores, bias, index, row_stride, TOP: tl.constexpr, GROUPS: tl.constexpr, LIMIT: tl.constexpr, SIZE: tl.constexpr,
    GROUP_ROOM: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    LEAST: tl.constexpr = -(1 << 62)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUP_ROOM)
    place = tl.arange(0, ROOM)
    number = group[:, None] * SIZE + place[None, :]
    inside = (group[:, None] < GROUPS) & (place[None, :] < SIZE)
    value = tl.load(scores + row * row_stride + number, mask=inside, other=0.0)
    if bias is not None:
        value += tl.load(bias + number, mask=inside, other=0.0)
    below = (GROUPS * SIZE - 1 - number).to(tl.int64)
    keys = tl.where(inside, _key(value, below), LEAST)
    if LIMIT < GROUPS:
        first = tl.max(keys, 1)
        strength = _value(first)
        if SIZE > 1:
            strength += _value(tl.max(tl.where(keys == first[:, None], LEAST, keys), 1))
        strongest = tl.where(group < GROUPS, _key(strength, (GROUPS - 1 - group).to(tl.int64)), LEAST)
        kept = group < 0
        for _ in tl.static_range(LIMIT):
            best = tl.max(strongest, 0)
            kept = kept | (strongest == best)
            strongest = tl.where(strongest == best, LEAST, strongest)
        nothing = tl.full((GROUP_ROOM, ROOM), float("-inf"), tl.float32)
        keys = tl.where(inside & (kept[:, None] == 0), _key(nothing, below), keys)
    for choice in tl.static_range(TOP):
        best = tl.max(tl.max(keys, 1), 0)
        tl.store(index + row * TOP + choice, GROUPS * SIZE - 1 - (best & 0xFFFFF))
        keys = tl.where(keys == best, LEAST, keys)


def launch_choose(scores: Tensor, bias: Tensor | None, top: int, groups: int, limit: int) -> Any:
    """[N, top] int64: as the twin, of scores [N, experts] in float32."""
    tokens, experts = scores.shape
    if (
        scores.dtype is not torch.float32
        or experts > 1 << _ID_BITS
        or (bias is not None and bias.dtype != scores.dtype)
    ):
        return NotImplemented
    groups, limit = (groups, limit) if limit < groups else (1, 1)
    size = experts // groups
    room, group_room = triton.next_power_of_2(size), triton.next_power_of_2(groups)
    index = torch.empty(tokens, top, dtype=torch.int64, device=scores.device)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    if tokens:
        _choose[(tokens,)](
            scores, None if bias is None else bias.contiguous(), index, scores.stride(0), TOP=top, GROUPS=groups,
            LIMIT=limit, SIZE=size, GROUP_ROOM=group_room, ROOM=room,
            num_warps=min(8, max(1, room * group_room // _LANES)), **OPTIONS,
        )  # fmt: skip
    return index


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(index, tokens, EXPERTS: tl.constexpr, K: tl.constexpr, ROOM: tl.constexpr, block, BLOCK: tl.constexpr):
    token = block * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, ROOM)
    inside = (token[:, None] < tokens) & (slot[None, :] < K)
    at = token[:, None].to(tl.int64) * K + slot[None, :]
    chosen = tl.load(index + at, mask=inside, other=EXPERTS + 1)
    return at, inside, chosen, tl.where((chosen < 0) | (chosen > EXPERTS), EXPERTS, chosen)


@triton.jit  # type: ignore[untyped-decorator]
def _sort(
    index, ids, slots, unsorted, tokens, block, EXPERTS: tl.constexpr, K: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at, inside, _, number = _numbers(index, tokens, EXPERTS, K, ROOM, block, BLOCK)
    slot = tl.arange(0, ROOM)
    number = tl.where(inside, number, EXPERTS + 1)
    one, other = number[:, :, None], number[:, None, :]
    before = (other < one) | ((other == one) & (slot[None, None, :] < slot[None, :, None]))
    rank = tl.sum(before.to(tl.int32), 2)
    tl.store(unsorted + at, number, mask=inside)
    to = at - slot[None, :] + rank
    tl.store(ids + to, number, mask=inside)
    tl.store(slots + to, slot[None, :] + rank * 0, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _tell(
    index, weight, told, tokens, column, columns, EXPERTS: tl.constexpr, K: tl.constexpr, ROOM: tl.constexpr,
    CAPACITY: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    counted = tl.zeros((BLOCK,), dtype=tl.int32)
    flags = tl.zeros((BLOCK,), dtype=tl.int32)
    weights = tl.zeros((BLOCK,), dtype=tl.float32)
    slot = tl.arange(0, ROOM)
    for block in range(tl.cdiv(tokens, BLOCK)):
        at, inside, chosen, number = _numbers(index, tokens, EXPERTS, K, ROOM, block, BLOCK)
        number = tl.where(inside, number, EXPERTS + 1)
        if column < EXPERTS:
            counted += tl.sum((number == column).to(tl.int32), 1)
        elif column == columns - 2:
            counted += tl.sum((inside & (slot[None, :] == 0) & (chosen != -2)).to(tl.int32), 1)
        elif column == columns - 1:
            beyond = tl.max((inside & (chosen >= EXPERTS)).to(tl.int32), 1)
            one, other = number[:, :, None], number[:, None, :]
            twice = (one == other) & (one < EXPERTS) & (slot[None, None, :] < slot[None, :, None])
            flags = flags | beyond | (tl.max(tl.max(twice.to(tl.int32), 2), 1) * 4)
            weights += tl.sum(tl.load(weight + at, mask=inside, other=0.0).to(tl.float32), 1)
        elif CAPACITY >= 0:
            mark = tl.minimum(-3 - chosen, EXPERTS)
            counted += tl.sum((inside & (chosen < -2) & (mark == column - EXPERTS)).to(tl.int32), 1)
        else:
            of_rank = (number < EXPERTS) & (number // (EXPERTS // RANKS) == column - EXPERTS)
            of_node = (number < EXPERTS) & (number // (EXPERTS // NODES) == column - EXPERTS - RANKS)
            held = tl.where(column < EXPERTS + RANKS, of_rank, of_node)
            counted += tl.max(held.to(tl.int32), 1)
    count = tl.sum(counted)
    if column == columns - 1:
        total = tl.sum(weights)
        tl.atomic_or(told + column, tl.reduce_or(flags, 0) | tl.where(total != total, 2, 0))
    else:
        tl.store(told + column, count)
        if (CAPACITY >= 0) & (column < EXPERTS) & (count > CAPACITY):
            tl.atomic_or(told + columns - 1, 8)


@triton.jit  # type: ignore[untyped-decorator]
def _count(
    index, weight, ids, slots, unsorted, told, tokens, columns, EXPERTS: tl.constexpr, K: tl.constexpr,
    ROOM: tl.constexpr, CAPACITY: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < columns:
        _tell(index, weight, told, tokens, program, columns, EXPERTS, K, ROOM, CAPACITY, RANKS, NODES, BLOCK)
    else:
        _sort(index, ids, slots, unsorted, tokens, program - columns, EXPERTS, K, ROOM, BLOCK)


def launch_count(index: Tensor, weight: Tensor | None, shape: Sequence[int]) -> Any:
    """(ids, slots, unsorted, counts): as the twin, of choices [N, k]. shape: `moe.counts.Shape.numbers`."""
    if weight is None or index.dim() != 2 or index.dtype is not torch.int64:
        return NotImplemented
    experts, nodes, per_node, _, method, capacity, *_ = shape
    tokens, k = index.shape
    distinct = method != 0 and capacity < 0
    columns = experts * (1 + (capacity >= 0)) + (nodes * per_node + nodes) * distinct + 2
    small = torch.int16 if experts < 2**15 - 1 else torch.int32
    ids, unsorted = (torch.empty(tokens, k, dtype=small, device=index.device) for _ in range(2))
    slots = torch.empty(tokens, k, dtype=torch.int64, device=index.device)
    told = torch.zeros(columns, dtype=torch.int32, device=index.device)
    _count[(columns + triton.cdiv(tokens, _TOKENS),)](
        index.contiguous(), weight.contiguous(), ids, slots, unsorted, told, tokens, columns, EXPERTS=experts, K=k,
        ROOM=triton.next_power_of_2(k), CAPACITY=capacity, RANKS=nodes * per_node, NODES=nodes, BLOCK=_TOKENS,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    return ids, slots, unsorted, told
