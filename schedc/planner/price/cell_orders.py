"""Times by which cells of plans are ordered. The model alone decides them, and no speed or constant.

A search at the times of a plan finds another order at each speed, so that a faster link may make a step slower. Orders
are therefore found beforehand, at fixed ratios of exchanges to compute. The price of a plan is its shortest step over
these orders. It never grows where a time falls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from schedc.cell.costs import AGAIN, CellCosts, SegmentTimes
from schedc.diagnostics import CompilerBug
from schedc.model.counts import part_flops, product_flops
from schedc.model.parts import PartName, outside_parts, parts_of
from schedc.model.sizes import LayerKind, ModelSizes

_ONE_LANE = tuple({"rail": ratio, "node": ratio} for ratio in (0.07, 0.6, 0.7, 0.9, 1.0, 1.2, 1.8, 3.0))
_TWO_LANES = tuple(
    {"rail": rail, "node": node}
    for rail, node in (
        (0.5, 0.5), (0.05, 0.5), (0.05, 1.6), (0.35, 0.05), (0.35, 1.2), (0.7, 0.35), (1.2, 0.2), (1.6, 0.05),
        (2.2, 1.6),
    )
)  # fmt: skip
"""Time of the exchanges of a layer on each lane over that of its compute, forward and backward: an order for each.

With these, steps are longest over a search at the same times by 0.5 % in the mean (docs/decisions/0096).
"""

_FLOP_PER_BYTE = 150.0
"""FLOPs in the time of a byte of memory, on no device in particular."""

_SCORES_BACKWARD = 2.5
"""Products of scores backward over those forward: they are computed again."""


def orderings(model: ModelSizes, costs: CellCosts) -> tuple[CellCosts, ...]:
    """Times by which cells are ordered: one for each ratio of exchanges to compute.

    costs: those of the cells of a plan, of which only the names count. The compute of a layer with experts takes 1.
    """
    return _orderings(model, *(tuple(name for name, _ in part) for part in (costs.segments, costs.exchanges)))


@lru_cache(maxsize=64)
def _orderings(model: ModelSizes, segments: tuple[str, ...], exchanges: tuple[str, ...]) -> tuple[CellCosts, ...]:
    flops = dict(_segment_flops(model))
    if missing := [name for name in segments if name not in flops]:
        raise CompilerBug("planner", f"cells have {missing}, by which no order is found")
    layer = sum(sum(flops[name]) for name in segments if name in _OF_LAYER)
    compute = {name: SegmentTimes(*(round(time / layer, 4) for time in flops[name])) for name in segments}
    lanes = {name.rpartition(".")[2] for name in exchanges}
    return tuple(
        CellCosts(tuple(compute.items()), tuple(_exchanges(exchanges, ratio)), brief=True)
        for ratio in (_TWO_LANES if len(lanes) > 1 else _ONE_LANE)
    )


def _exchanges(names: tuple[str, ...], ratio: Mapping[str, float]) -> Iterator[tuple[str, SegmentTimes]]:
    """A dispatch and a combine, forward and backward, share the time of a layer's exchanges on a lane."""
    for name in names:
        time = ratio[name.rpartition(".")[2]] / 4
        yield name, SegmentTimes(time, time)


_OF_LAYER = frozenset({"attention", "permute", "experts", "post", "shared"})
"""The segments of a layer with experts."""


def _segment_flops(model: ModelSizes) -> Iterator[tuple[str, SegmentTimes]]:
    """FLOPs of the segments of cells for a token; bytes that move count as FLOPs. What each op takes counts nothing."""
    dense, hidden = parts_of(model, LayerKind.DENSE), model.hidden
    attention = dense[PartName.ATTENTION]
    scores = part_flops(attention, model.seq) - product_flops(attention)
    norms = hidden * (4 * model.norms + 12)
    yield "op", SegmentTimes(0.0)
    yield "embedding", _times(0, 4 * hidden)
    yield "head", _times(product_flops(outside_parts(model)[PartName.HEAD]), 10 * model.vocab)
    yield "mtp", _times(4 * hidden**2, 8 * hidden)
    mlp = product_flops(attention) + product_flops(dense[PartName.DENSE])
    yield "dense", _times(mlp, norms + 6 * model.ffn, scores)
    yield "attention" + AGAIN, _times(0, 4 * hidden * model.norms)
    yield "dense" + AGAIN, _times(0, 4 * hidden * model.norms + 6 * model.ffn)
    if (moe := model.moe) is not None:
        yield "experts" + AGAIN, _times(0, 6 * moe.top * moe.width)
        experts, rows = parts_of(model, LayerKind.MOE), moe.top * hidden
        router = product_flops(experts[PartName.ROUTER])
        yield "attention", _times(product_flops(attention) + router, norms, scores)
        yield "permute", _times(0, 4 * rows)
        yield "post", _times(0, 4 * rows)
        yield "experts", _times(product_flops(experts[PartName.EXPERTS]), 6 * moe.top * moe.width)
        yield "shared", _times(product_flops(experts[PartName.SHARED]))


def _times(products: float, bytes: float = 0.0, scores: float = 0.0) -> SegmentTimes:
    """FLOPs forward, of input gradients and of weight gradients. Only products have all three."""
    moved = bytes * _FLOP_PER_BYTE
    return SegmentTimes(products + scores + moved, products + _SCORES_BACKWARD * scores + 1.5 * moved, products)
