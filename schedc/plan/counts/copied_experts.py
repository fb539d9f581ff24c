"""What copies of experts make of known rows: who computes how many, and how many copies travel.

Recorded rows by expert go through the closed form that the runtime runs (`schedc.step.costs.forest`). Rows by rank
alone say who computes how many, and no number of copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import Lane
from schedc.cell.rows import CellRows
from schedc.ir.arrays import Floats, Int64
from schedc.ir.plan import Hot, Plan, bytes_per_number
from schedc.plan.counts.layers import moe_layer
from schedc.plan.counts.rows import chosen_method, travelling_rows
from schedc.step.costs.exchange import hot_break_even
from schedc.step.costs.forest import NUMPY, forest_of
from schedc.step.costs.hot_choice import HotRule, HotTimes, hot_of_step, rows_beside_hot
from schedc.units import shown

_WHOLE = 1 << 20
"""Rows of a rank with the mean, where rows are given as factors: the form takes whole numbers."""


@dataclass(frozen=True, eq=False)
class RowsWithCopies:
    """Rows that ranks compute with copies of experts.

    factors: [layers or 1, microbatches or 1, ranks] rows over their mean. sent, held: [layers, microbatches, ranks]
    copies by microbatch that a rank sends and holds; None where rows by expert are not known. hot: [layers] experts
    that are lent to all ranks for the step; empty without any.
    """

    factors: Floats
    sent: Int64 | None = None
    held: Int64 | None = None
    hot: tuple[int, ...] = ()

    @property
    def busiest(self) -> Floats | None:
        """[layers, microbatches, ranks] copies on the fuller direction of each rank's links."""
        if self.sent is None or self.held is None:
            return None
        return np.maximum(self.sent, self.held).astype(np.float64)


def rows_with_copies(plan: Plan, costs: CellCosts, rows: CellRows) -> RowsWithCopies:
    """The rows under a plan with `balance by microbatch`, or `hot` by step; as they are under other plans.

    costs: times of cells, by which hot experts are chosen.
    """
    balance = plan.balance
    if plan.hot is not None and not plan.hot.by_microbatch:
        return _beside_hot(plan, plan.hot, costs, rows)
    if balance is None or balance.by != "microbatch" or balance.in_place:
        return RowsWithCopies(rows.factors)
    within = Fraction(repr(balance.within))
    if rows.imbalance is not None:  # a rank with the mean takes none of these rows
        return RowsWithCopies(np.minimum(rows.factors, max(1.0, float(within))))
    by_expert = _by_home(rows)
    if by_expert is None:
        given = np.rint(rows.factors * _WHOLE).astype(np.int64)[..., None]
        return RowsWithCopies(_evened(given, within, _nodes(plan)).factors)
    return _evened(by_expert, within, _nodes(plan))


def _beside_hot(plan: Plan, hot: Hot, costs: CellCosts, rows: CellRows) -> RowsWithCopies:
    """The last recorded step, with the experts that are hot by the rows of the step before it.

    A record of one step gives both.
    """
    record = None if rows.recorded is None else rows.recorded.by_expert
    if record is None or plan.experts is None or plan.capacity is not None or not plan.has_expert_sizes:
        return RowsWithCopies(rows.factors)
    rule, computed, lent = _hot_rule(plan, hot, costs, record.shape[3]), [], []
    for before, now in zip(record[0].astype(np.int64), record[-1].astype(np.int64), strict=True):
        chosen = hot_of_step(before.sum(0), rule, len(before))
        computed.append(rows_beside_hot(now, chosen))
        lent.append(len(chosen))
    load = np.stack(computed)
    mean = load.mean()
    return RowsWithCopies(np.asarray(load / mean if mean else np.ones(load.shape)), hot=tuple(lent))


def _hot_rule(plan: Plan, hot: Hot, costs: CellCosts, ranks: int) -> HotRule:
    """The rule by which the runtime lends experts of a plan with their sizes."""
    assert plan.experts is not None
    width, number = plan.experts.width, bytes_per_number(plan.dtype)
    most = plan.experts.count // ranks if hot.most is None else hot.most
    return HotRule(most, hot.below, hot_break_even(width, number), HotTimes.of(costs, width, number, ranks))


def _by_home(rows: CellRows) -> Int64 | None:
    """[layers, microbatches, ranks, experts of a rank] rows of the last recorded step by home; None where not known."""
    if rows.recorded is None or rows.recorded.by_expert is None:
        return None
    last = rows.recorded.by_expert[-1].sum(axis=2, dtype=np.int64)
    return np.asarray(last.reshape(*last.shape[:2], rows.recorded.shape[2], -1))


def _nodes(plan: Plan) -> int:
    """The nodes inside of which rows move; 1 where they move among all ranks of the group."""
    nodes = plan.topology.nodes if plan.topology else 1
    return nodes if plan.balance is not None and plan.balance.inside_nodes(nodes) else 1


def _evened(rows: Int64, within: Fraction, nodes: int) -> RowsWithCopies:
    """The rows and copies of the closed form inside each of the ``nodes``.

    rows: [layers, microbatches, ranks, experts of a rank] by home.
    """
    layers, microbatches, ranks, own = rows.shape
    inside = rows.reshape(layers, microbatches, nodes, ranks // nodes, own)
    forest = forest_of(inside, within)
    held = (forest.quota > 0).sum(-1)
    given, sent = (NUMPY.add(np.zeros_like(each), forest.parent, each) for each in (forest.taken, held))
    load = inside.sum(-1) + forest.taken - given
    load, sent, held = (each.reshape(rows.shape[:3]) for each in (load, sent, held))
    mean = load.mean()
    return RowsWithCopies(load / mean if mean else np.ones(load.shape), sent, held)


# ---- times and bytes of copies


def copy_time(plan: Plan, costs: CellCosts) -> SegmentTimes | None:
    """Time of one copy, there and back, in the unit of the costs; None where plan or costs say too little.

    The lane of the rows carries it as fast as it carries these: a dispatch of `flat` moves (R - 1) / R of the mean
    rows of R ranks. A dispatch of two hops moves the rows of its second hop.
    """
    lane = lane_of(plan)
    dispatch = dict(costs.exchanges).get(f"dispatch.{lane}")
    experts, ranks = plan.experts, plan.topology.ranks if plan.topology else 0
    if dispatch is None or experts is None or not (plan.has_expert_sizes and plan.tokens and ranks > 1):
        return None
    choice, travelling = chosen_method(plan), travelling_rows(plan)
    method = choice.method if choice else str(plan.method)
    of_token = experts.top * (ranks - 1) / ranks if method == "flat" else getattr(travelling[method], lane.value)
    rows = plan.tokens * of_token
    per_byte = dispatch.forward / (rows * plan.dispatch_row_bytes)
    weights, gradients = copy_bytes(plan)
    return SegmentTimes(per_byte * weights, per_byte * gradients)


def copy_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes of the weights of a copy, and of its gradients on their way back. The plan has the sizes of experts."""
    assert plan.experts is not None
    layer = moe_layer(plan, plan.experts)
    return layer.slot_bytes, layer.slot_gradient_bytes


def lane_of(plan: Plan) -> Lane:
    """The lane on which copies travel."""
    nodes = plan.topology.nodes if plan.topology else 1
    inside = plan.balance is not None and plan.balance.inside_nodes(nodes)
    return Lane.RAIL if nodes > 1 and not inside else Lane.NODE


def copied_rows(plan: Plan, costs: CellCosts, rows: CellRows) -> tuple[RowsWithCopies, SegmentTimes | None]:
    """What copies make of the rows, and the time of the exchange of copies: of the busiest rank, in the mean.

    None where the exchange has a time in the costs, or no copies are counted, or plan or costs do not say their time.
    """
    copied = rows_with_copies(plan, costs, rows)
    busiest, lane = copied.busiest, lane_of(plan)
    one = None if f"hot.{lane}" in dict(costs.exchanges) or busiest is None else copy_time(plan, costs)
    if one is None or busiest is None:
        return copied, None
    most = float(busiest.max(axis=2).mean())
    return copied, SegmentTimes(one.forward * most, one.input_gradient * most)


def exposed_beside_step(plan: Plan, costs: CellCosts, rows: CellRows, copied: RowsWithCopies) -> list[float]:
    """[layers] time of a step's hot experts that no idle lane hides, in the unit of the costs: as `hot auto` counts it.

    Empty without hot experts, or where the costs do not say it.
    """
    record = None if rows.recorded is None else rows.recorded.by_expert
    if not copied.hot or record is None or plan.hot is None:
        return []
    times = _hot_rule(plan, plan.hot, costs, record.shape[3]).times
    if not times.mean_copy:  # the costs do not say what the rows take
        return []
    microbatches = record.shape[2]
    mean = float(record[-1].sum(axis=(2, 3)).mean()) / record.shape[3]
    return [-times.gain(0.0, number, mean, microbatches) for number in copied.hot]


# ---- facts and text


def copies_facts(plan: Plan, costs: CellCosts, rows: CellRows) -> dict[str, Any]:
    """What copies make of the rows. fullest, after: rows of the fullest rank over the mean, without and with copies:
    the mean over layers and microbatches, and the worst.

    sent, held: mean copies of the busiest home and on a rank, in a layer and microbatch. hot: mean number of experts of
    a layer that are lent for the step; foreseen: whether by the rows of the step before. bytes: those of copies that
    leave the busiest home in a layer and microbatch, there and back. Null where the rows or the plan say too little.
    unpriced: why the copies take no time in the step, or null.
    """
    copied, time = copied_rows(plan, costs, rows)
    before, after = (_fullest(factors, rows) for factors in (rows.factors, copied.factors))
    facts: dict[str, Any] = {"fullest": before, "after": after, "sent": None, "held": None, "bytes": None}
    if copied.sent is not None and copied.held is not None:
        sent = float(copied.sent.max(axis=2).mean())
        facts |= {"sent": sent, "held": float(copied.held.mean())}
        facts["bytes"] = sent * sum(copy_bytes(plan)) if plan.has_expert_sizes else None
    facts["hot"] = sum(copied.hot) / len(copied.hot) if copied.hot else None
    record = None if rows.recorded is None else rows.recorded.by_expert
    facts["foreseen"] = record is not None and len(record) > 1
    return facts | {"unpriced": _unpriced(plan, costs, copied, time)}


def _unpriced(plan: Plan, costs: CellCosts, copied: RowsWithCopies, time: SegmentTimes | None) -> str | None:
    lane, balance = lane_of(plan), plan.balance
    if time is not None or f"hot.{lane}" in dict(costs.exchanges) or (balance is not None and balance.in_place):
        return None
    if balance is not None and balance.by == "step":
        return "copies for a step are not priced yet, and rows are those without them"
    if balance is None:
        return _unpriced_hot(plan, copied)
    if copied.sent is None:
        return "the rows say no experts: record them with `Pipeline.record_routing`"
    return f"that needs `tokens`, the sizes of `experts`, and `dispatch.{lane}` in the table [cell]"


def _unpriced_hot(plan: Plan, copied: RowsWithCopies) -> str | None:
    if plan.hot is not None and plan.hot.by_microbatch:
        return "hot experts by microbatch are not priced, and rows are those without them"
    if plan.hot is not None and not copied.hot:
        return "rows are those without them, since that needs rows by expert and the sizes of `experts`"
    return "copies for a step travel beside it, on no lane of the cells" if any(copied.hot) else None


def _fullest(factors: Floats, rows: CellRows) -> dict[str, float]:
    """By the mean of the ranks; an imbalance is over it already, and does not give all ranks."""
    mean = np.ones(1) if rows.imbalance is not None else np.maximum(factors.mean(axis=2), 1e-300)
    most = factors.max(axis=2) / mean
    return {"mean": float(most.mean()), "worst": float(most.max())}


def copies_text(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people."""
    before, after = facts["fullest"], facts["after"]
    size = "" if facts["bytes"] is None else f", {shown(facts['bytes'])} of them there and back"
    copies = (
        ""
        if facts["sent"] is None
        else f"; {facts['held']:.2f} copies on a rank, {facts['sent']:.2f} leave the busiest home{size}"
    )
    unpriced = f"; copies take no time here: {facts['unpriced']}" if facts["unpriced"] else ""
    yield (
        f"  fullest rank: {before['mean']:.3f} of the mean rows (worst {before['worst']:.3f}) without copies, "
        f"{after['mean']:.3f} (worst {after['worst']:.3f}) with them{copies}{unpriced}"
    )
