"""Arguments for the operations that plan where rows of experts go, and weigh choices, by kernel.

Tables of counts are those that ranks with random choices would gather. One rank's plan is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from schedc.ir.plan import Drop
from schedc.step.costs.exchange import BoundedRows
from schedc_runtime.moe.bags import Take
from schedc_runtime.moe.capacity import _dropped
from schedc_runtime.moe.counts import ABSENT, Counts, Shape, ascending, counted_rows
from schedc_runtime.moe.routes import Route, leave, pass_on, plan_route

Args = tuple[Any, ...]
Numbers = Sequence[Sequence[int]]
NAN = float("nan")


def _weights(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    if dtype is not torch.float32:
        return
    for tokens, experts, top, normalise, shared in (
        (9, 24, 3, True, True),
        (5, 8, 1, False, False),
        (0, 4, 2, True, True),
    ):
        scores = torch.rand(tokens, 2 * experts).to(device)[:, :experts]
        index = torch.rand(tokens, experts).argsort(-1)[:, :top].to(device)
        yield scores, index, normalise, 2.5, shared


def _weights_backward(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for scores, index, normalise, scale, shared in _weights(dtype, device):
        of_shares = torch.randn(scores.shape).to(device) if shared else None
        yield torch.randn(index.shape).to(device), of_shares, scores, index, normalise, scale


def _balance(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for replicas, experts, total in ((3, 24, None), (1, 8, 0.25)):
        everyone = torch.stack((torch.randint(0, 9, (replicas, experts)), torch.rand(replicas, experts)), 1).double()
        held = None if total is None else torch.tensor(total, dtype=torch.float64, device=device)
        yield torch.rand(experts).to(device, dtype), everyone.to(device), held, 2, 1e-3, 0.3
    yield torch.rand(experts).to(device, dtype), torch.zeros_like(everyone).to(device), None, 2, 1e-3, 1.0


def _add_load(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for experts, drops in ((8, False), (150, True)):
        table = torch.randint(0, 99, (3, experts * (1 + drops) + 2)).to(device, torch.int32)
        yield torch.randint(0, 9, (experts,)).to(device), torch.tensor(5, device=device), table, drops


def _tally(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    index = torch.randint(0, 6, (700, 2)).to(device)
    index[3], index[4] = ABSENT, ABSENT - 1 - index[4]
    for choices in (index, index[:0]):
        yield choices, torch.rand(6).to(device, dtype)


def _drop(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    index = torch.rand(50, 7).argsort(-1)[:, :3].to(device)
    weight = (4 * torch.rand(50, 3)).round() / 4
    weight[7, 1], weight[9, 2], weight[11, 0] = NAN, -0.0, -1.0
    for drop, slots in product(Drop, (1, 13)):
        yield index, weight.to(device, dtype), slots, drop.value
    yield index[:0], weight[:0].to(device, dtype), 1, "probs"


_BOUNDED = BoundedRows(40, 37, 30)
SHAPES = (
    Shape(4),
    Shape(8, 2, 2, 1),
    Shape(8, 2, 2, 2, capacity=9),
    Shape(8, 2, 2, 3, tokens=37, bounds=_BOUNDED),
    Shape(8, 1, 4, 1, tokens=37, bounds=BoundedRows(14, 14, 14)),
    Shape(8, 2, 2, 1, "hierarchical"),
    Shape(12, 2, 3, 4, "hierarchical", capacity=9, tokens=37),
    Shape(8, 2, 2, 2, "hierarchical", tokens=37, bounds=_BOUNDED),
    Shape(8, 2, 2, 0, "hierarchical", tokens=37, bounds=BoundedRows(9, 14, 11)),
    Shape(8, 2, 2, 3, "allgather"),
    Shape(8, 2, 2, 1, "allgather", capacity=9, tokens=40),
    Shape(8, 2, 2, 2, "allgather", tokens=40, bounds=BoundedRows(20, 17, 9)),
)
"""Exact sizes, a capacity and bounds, which two of the shapes exceed."""


@cache
def _routes(shape: Shape) -> tuple[Route, ...]:
    """The routes of all ranks, whose tokens choose three experts each."""
    generator, choices, rows = torch.Generator().manual_seed(shape.rank), [], []
    for rank in range(shape.ranks):
        tokens = 37 if shape.padded else 30 + rank + 400 * (shape.rank == 1)
        index = torch.rand(tokens, shape.experts, generator=generator).argsort(-1)[:, :3]
        if shape.capacity is not None:
            index, _, _ = _dropped(index, torch.ones(index.shape), shape.capacity, Drop.POSITION.value)
        choices.append(ascending(index, shape.experts))
        rows.append(counted_rows(choices[-1], index, shape, torch.ones(index.shape)))
    table = torch.stack(rows)
    shapes = [replace(shape, rank=rank) for rank in range(shape.ranks)]
    return tuple(plan_route(own, Counts(table, other)) for own, other in zip(choices, shapes, strict=True))


def _copied(ids: Tensor, take: Take, experts: int) -> Tensor:
    """[copies, k] what a hop sends of ids [rows, k]: padding has the number behind the last expert."""
    sent = ids.index_select(0, take.at)
    return sent if take.blank is None else sent.masked_fill(take.blank[:, None], experts)


def _exchanged(
    sent: Sequence[Tensor], splits: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
) -> list[Tensor]:
    """What each rank gets of the rows of its group."""
    parts = [rows.split(list(split)) for rows, split in zip(sent, splits, strict=True)]
    result = list(sent)
    for group in groups:
        for place, rank in enumerate(group):
            result[rank] = torch.cat([parts[other][place] for other in group])
    return result


@cache
def _hops(shape: Shape) -> tuple[Tensor, Tensor]:
    """([rows, k], [rows, k]) experts of the rows that reach the shape's rank over the rail, and in the node."""
    routes, ranks = _routes(shape), range(shape.ranks)
    rails = [list(ranks[place :: shape.per_node]) for place in range(shape.per_node)]
    nodes = [list(ranks[first : first + shape.per_node]) for first in ranks[:: shape.per_node]]
    sent = [_copied(route.choices.ids, leave(route).rows.copies, shape.experts) for route in routes]
    railed = _exchanged(sent, [route.sizes.hops["rail"].send for route in routes], rails)
    passed = [
        _copied(ids, pass_on(route, ids).copies, shape.experts) for route, ids in zip(routes, railed, strict=True)
    ]
    landed = _exchanged(passed, [route.sizes.hops["node"].send for route in routes], nodes)
    return railed[shape.rank], landed[shape.rank]


def _of(*hops: bool) -> Iterator[tuple[Shape, Route]]:
    """The shapes without or with two hops, each with the route of its rank."""
    for shape in SHAPES:
        if shape.two_hops in hops:
            yield shape, _routes(shape)[shape.rank]


def _empty(shape: Shape, top: int = 2) -> tuple[Tensor, Tensor]:
    """([0, k], [R, columns]) no choices, and the counts of ranks that have none."""
    return torch.empty(0, top, dtype=torch.int16), torch.zeros(shape.ranks, shape.columns, dtype=torch.int32)


def _plan_packing(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for shape, route in _of(False):
        ids, slots, unsorted = route.choices.ids, route.choices.slots, route.choices.unsorted
        runs = [part.to(device) for part in route.copied.runs]
        lists = (part.to(device) for part in (ids, slots, unsorted, route.counts.table))
        yield *lists, runs, list(route.sizes.bags), shape.numbers
    for shape in (Shape(4, capacity=3), Shape(4)):
        ids, table = _empty(shape)
        yield *(part.to(device) for part in (ids, ids.long(), ids, table)), [], [], shape.numbers


def _plan_landing(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for shape, route in _of(False):
        yield route.counts.table.to(device), route.sizes.rows, shape.numbers
    yield torch.zeros(4, 10, dtype=torch.int32, device=device), 0, Shape(8, 1, 4).numbers


def _plan_sizes(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for shape, route in _of(False, True):
        if not shape.padded:
            yield route.choices.ids.to(device), route.counts.table.to(device), shape.numbers
    for shape in (Shape(8, 2, 2, 1), Shape(8, 2, 2, 1, "hierarchical")):
        yield *(part.to(device) for part in _empty(shape)), shape.numbers


def _plan_rail_packing(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for shape, route in _of(True):
        choices, length = route.choices, sum(route.sizes.hops["rail"].send)
        yield choices.ids.to(device), choices.slots.to(device), length, shape.numbers


def _plan_relay(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for shape, route in _of(True):
        yield _hops(shape)[0].to(device), sum(route.sizes.hops["node"].send), shape.numbers
    yield torch.empty(0, 2, dtype=torch.int16, device=device), 0, Shape(8, 2, 2, 1, "hierarchical").numbers


def _plan_hop_landing(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for shape, route in _of(True):
        yield _hops(shape)[1].to(device), route.counts.table.to(device), route.sizes.rows, shape.numbers


def _note(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for number, (shape, route) in enumerate(_of(False, True)):
        table = route.counts.table.clone()
        table[0, -1] = 5
        kind = torch.int32 if shape.bounds is None else torch.int64
        flags = torch.arange(shape.ranks, dtype=kind, device=device) if number % 2 else None
        yield table.to(device), flags, torch.tensor((7,), device=device) if number % 3 else None, shape.numbers


def _once(cases: Callable[[torch.dtype, torch.device], Iterator[Args]]) -> Callable[..., Iterator[Args]]:
    """Whole numbers alone, which no dtype changes."""
    return lambda dtype, device: cases(dtype, device) if dtype is torch.float32 else iter(())


ROUTE_CASES: dict[str, Callable[[torch.dtype, torch.device], Iterator[Args]]] = {
    "weights": _weights,
    "weights_backward": _weights_backward,
    "balance": _balance,
    "add_load": _once(_add_load),
    "tally": _tally,
    "note": _once(_note),
    "drop": _drop,
    "plan_packing": _once(_plan_packing),
    "plan_landing": _once(_plan_landing),
    "plan_sizes": _once(_plan_sizes),
    "plan_rail_packing": _once(_plan_rail_packing),
    "plan_relay": _once(_plan_relay),
    "plan_hop_landing": _once(_plan_hop_landing),
}
"""By kernel: arguments of its twin."""
