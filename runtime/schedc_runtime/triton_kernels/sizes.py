"""The sizes of a route that the host needs, in Triton. `schedc_runtime.moe.sizes` says what they are.

Each number is the sum of a rectangle of everyone's counts: a program for each. A program for each level of sums goes
over all choices, and counts the runs of those that one rank or node holds.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.plans import BLOCK, OPTIONS
from schedc_runtime.triton_kernels.route_shape import Shape, counted_group_sizes


class Rectangles(NamedTuple):
    """Sums of ``number`` rectangles of a table: the sizes of one name.

    row, column: of the first rectangle's first entry. next_row, next_column: what each next rectangle adds. step: from
    one row of a rectangle to its next. rows, columns: of each rectangle.
    """

    number: int
    row: int
    next_row: int
    step: int
    rows: int
    column: int
    next_column: int
    columns: int


def rectangles(shape: Shape) -> tuple[list[Rectangles], int]:
    """(the sizes in the order of `moe.sizes`, without those of bags; how many stand before these)."""
    ranks, local, last = shape.ranks, shape.local, shape.columns
    mine, (node, position) = shape.rank * local, shape.place
    result = [
        Rectangles(ranks, 0, 1, 1, 1, last - 1, 0, 1),
        Rectangles(ranks, 0, 1, 1, 1, last - 2, 0, 1),
        Rectangles(ranks, 0, 0, 1, ranks, 0, local, local),
        Rectangles(local, 0, 0, 1, ranks, mine, 1, 1),
    ]
    before = sum(part.number for part in result)
    if not shape.two_hops:
        send = Rectangles(ranks, shape.rank, 0, 1, 1, 0, local, local)
        return [*result, send, Rectangles(ranks, 0, 1, 1, 1, mine, 0, local)], before
    nodes, per_node = shape.nodes, shape.per_node
    of_ranks, of_nodes = shape.experts, shape.experts + ranks
    if shape.method == "allgather":
        result.append(Rectangles(nodes, shape.rank, 0, 1, 1, last - 2, 0, 1))
        result.append(Rectangles(nodes, position, per_node, 1, 1, last - 2, 0, 1))
    else:
        result.append(Rectangles(nodes, shape.rank, 0, 1, 1, of_nodes, 1, 1))
        result.append(Rectangles(nodes, position, per_node, 1, 1, of_nodes + node, 0, 1))
    result.append(Rectangles(per_node, position, 0, per_node, nodes, of_ranks + node * per_node, 1, 1))
    result.append(Rectangles(per_node, 0, 1, per_node, nodes, of_ranks + shape.rank, 0, 1))
    return result, before


@triton.jit
def _runs(ids, starts, counted, bags, told, count, K: tl.constexpr, EXPERTS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    begun = tl.zeros((), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        number = tl.load(ids + at, mask=inside, other=EXPERTS).to(tl.int32)
        before = tl.load(ids + at - 1, mask=inside & (at % K != 0), other=-EXPERTS).to(tl.int32)
        begins = (number < EXPERTS) & (number // SIZE != before // SIZE)
        here = begun + tl.cumsum(begins.to(tl.int32), 0)
        tl.store(starts + at, begins.to(tl.uint8), mask=inside)
        tl.store(counted + at, here.to(tl.int64), mask=inside)
        begun += tl.sum(begins.to(tl.int32), 0)
    tl.store(bags, begun.to(tl.int64))
    tl.store(told, begun)


@triton.jit(do_not_specialize=["count"])
def _plan_sizes(
    ids, table, told, starts, counted, bags, count, columns, K: tl.constexpr, EXPERTS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, PARTS: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = (FIRST > 0) + (SECOND > 0)
    program = tl.program_id(0)
    if program < LEVELS:
        for level in tl.static_range(LEVELS):
            if program == level:
                _runs(
                    ids, starts[level], counted[level], bags[level], told + BEFORE + level, count, K, EXPERTS,
                    FIRST if level == 0 else SECOND, BLOCK,
                )  # fmt: skip
    else:
        number = program - LEVELS
        row, across = tl.arange(0, ROWS)[:, None], tl.arange(0, ROOM)[None, :]
        first = 0
        for part in tl.static_range(len(PARTS)):
            if (number >= first) & (number < first + PARTS[part][0]):
                own = PARTS[part][1] + (number - first) * PARTS[part][2] + row * PARTS[part][3]
                at = own * columns + PARTS[part][5] + (number - first) * PARTS[part][6] + across
                inside = (row < PARTS[part][4]) & (across < PARTS[part][7])
                total = tl.sum(tl.sum(tl.load(table + at, mask=inside, other=0), 1), 0)
                tl.store(told + number + (LEVELS if number >= BEFORE else 0), total)
            first += PARTS[part][0]


def launch_plan_sizes(ids: Tensor, table: Tensor, numbers: Sequence[int]) -> list[Tensor]:
    """[vector of sizes, int32; lists of runs]: as the twin, of choices [N, k] and everyone's counts [R, columns]."""
    shape = Shape.of(numbers)
    parts, before = rectangles(shape)
    groups = () if shape.two_hops else counted_group_sizes(shape)
    size = sum(part.number for part in parts)
    told = torch.empty(size + len(groups), dtype=torch.int32, device=ids.device)
    starts = tuple(torch.empty(ids.shape, dtype=torch.bool, device=ids.device) for _ in groups)
    counted = tuple(torch.empty(ids.shape, dtype=torch.int64, device=ids.device) for _ in groups)
    bags = tuple(torch.empty((), dtype=torch.int64, device=ids.device) for _ in groups)
    first, second = (*groups, 0, 0)[:2]
    table = table.contiguous()
    _plan_sizes[(size + len(groups),)](
        ids.contiguous(), table, told, tuple(x.view(torch.uint8) for x in starts) or (told,), counted or (told,),
        bags or (told,), ids.numel(), table.shape[1], K=ids.shape[1], EXPERTS=shape.experts, FIRST=first, SECOND=second,
        PARTS=tuple(map(tuple, parts)), BEFORE=before, ROWS=triton.next_power_of_2(shape.ranks),
        ROOM=triton.next_power_of_2(shape.local), BLOCK=BLOCK, **OPTIONS,
    )  # fmt: skip
    return [told, *starts, *counted, *bags]
