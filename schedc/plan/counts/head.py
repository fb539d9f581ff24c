"""A head by the form of its loss: products and time of each op, bytes that it holds, and the better form."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.cell.costs import SegmentTimes
from schedc.cell.table import CellTable
from schedc.ir.arrays import Floats
from schedc.ir.ops import OpKind
from schedc.ir.plan import Plan, bytes_per_number
from schedc.ir.schedule import Schedule
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.parts import WORK, Layout, PartKind
from schedc.step.costs.costs import Costs
from schedc.step.costs.parts import PartCosts

_WIDE = 4
"""Bytes of a number in which losses are formed."""


class HeadProducts(NamedTuple):
    """How often an op computes each product of the head: logits, gradient of the input, gradient of the weight."""

    F: tuple[int, int, int]
    I: tuple[int, int, int]  # noqa: E741
    W: tuple[int, int, int]
    B: tuple[int, int, int]


PRODUCTS = {
    "whole": HeadProducts((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)),
    "early": HeadProducts((1, 1, 1), (0, 0, 0), (0, 0, 0), (0, 0, 0)),
    "again": HeadProducts((1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)),
}
"""By the form of the loss."""


def held_bytes(plan: Plan, form: str) -> int | None:
    """Bytes of head and loss that a microbatch holds from F to its backward; None where the plan says too little.

    They are the hidden states; whole, the logits' log-probabilities; again, a log-sum of each row.
    """
    vocab = plan.loss.vocab if plan.loss else 0
    if not plan.tokens or not plan.hidden or (form == "whole" and not vocab):
        return None
    row = plan.hidden * bytes_per_number(plan.dtype)
    return plan.tokens * (row + _WIDE * {"whole": vocab, "early": 0, "again": 1}[form])


def logit_bytes(plan: Plan) -> float:
    """Bytes per token of the logits while the loss is formed, in two types; 0 where the plan does not say the columns.

    A loss in chunks has those of a chunk.
    """
    if plan.loss is None or not plan.loss.vocab or not plan.tokens:
        return 0.0
    rows = plan.tokens if plan.loss.form == "whole" else min(plan.loss.chunk or plan.tokens, plan.tokens)
    return plan.loss.vocab * (_WIDE + bytes_per_number(plan.dtype)) * rows / plan.tokens


def with_head_times(of_stages: Costs, costs: Costs, layout: Layout, layers: LayerCosts, form: str) -> Costs:
    """The costs of the stages, whose head is whole, with the times of a head of this form.

    costs: those of a layer. Where these say times per stage, they know the head, and stay. Times of parts say how long
    each product takes: the logits as the head's F, the gradients of its input as I, those of its weight as W.
    """
    heads = layout.shares[:, WORK.index(PartKind.HEAD)] * (1.0 if costs.parts is not None else layers.time.head)
    if form == "whole" or not heads.any() or any(isinstance(cost, tuple) for cost in (costs.F, costs.I, costs.W)):
        return of_stages
    product = np.array([costs.F, costs.I, costs.W] if costs.parts is None else costs.parts.head, np.float64)
    whole = of_stages.resolved(len(heads))
    counts, before = PRODUCTS[form], PRODUCTS["whole"]

    def moved(op: str) -> tuple[float, ...]:
        change = float(np.subtract(getattr(counts, op), getattr(before, op)) @ product)
        return tuple(np.maximum(getattr(whole, op) + heads * change, 0.0).tolist())

    changed = {op: moved(op) for op in ("F", "I", "W", "B") if not isinstance(getattr(costs, op), tuple)}
    return replace(of_stages, **changed)  # type: ignore[arg-type]


def in_layout(layers: LayerCosts, form: str, schedule: Schedule, parts: PartCosts | None) -> LayerCosts:
    """Costs of parts by which layers are balanced; the head has what this form takes in all ops of a microbatch.

    parts: times of the head's products, where they are known.
    """
    counts = PRODUCTS[form]
    split = bool((schedule.kind == OpKind.W).any())
    ops = (counts.F, counts.I, counts.W) if split else (counts.F, counts.B)
    if parts is not None:
        return replace(layers, time=layers.time._replace(head=float(np.sum(ops, axis=0) @ np.array(parts.head))))
    share = float(np.sum(ops, axis=0) @ _factors(layers) / _factors(layers).sum())
    return replace(layers, time=layers.time._replace(head=layers.time.head * share))


def in_cells(table: CellTable, form: str, schedule: Schedule) -> CellTable:
    """The table with the products of this form in the node of the head; unchanged without such a node.

    In a cell a whole backward takes an I and a W. With the form `again` they share the logits if no backward of
    the head is split. Otherwise a whole backward makes the logits twice.
    """
    segments = dict(table.costs.segments)
    if form == "whole" or "head" not in segments:
        return table
    counts, product = PRODUCTS[form], np.array(segments["head"], np.float64)
    of_head = schedule.stage == schedule.stages - 1
    split = bool((schedule.kind[of_head] == OpKind.W).any())
    weight = np.array(counts.W) if split else np.subtract(counts.B, counts.I)
    times = (float(np.asarray(each) @ product) for each in (counts.F, counts.I, weight))
    changed = tuple({**segments, "head": SegmentTimes(*times)}.items())
    return replace(table, costs=replace(table.costs, segments=changed))


def _factors(layers: LayerCosts) -> Floats:
    return np.array([layers.F, layers.I, layers.W])
