"""What copies of experts make of known rows: who computes how many, and how many copies travel.

Recorded rows by expert go through the closed form that the runtime runs (`schedc.step.costs.forest`). Rows by rank
alone say who computes how many, and no number of copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import LINKS, Lane
from schedc.cell.recorded_rows import RecordedRows
from schedc.cell.rows import CellRows
from schedc.ir.arrays import Floats, Int32, Int64, bincount
from schedc.ir.plan import Balance, ExpertSizes, Hot, Plan, bytes_per_number
from schedc.plan.counts.copy_times import copy_bytes, copy_time, lane_of
from schedc.plan.counts.link_rows import link_rows, rows_between
from schedc.step.cells.step_copies import StepCopies
from schedc.step.costs.exchange import hot_break_even
from schedc.step.costs.forest import NUMPY, Forest, forest_of
from schedc.step.costs.hot_choice import HotRule, HotTimes, hot_of_step, rows_beside_hot
from schedc.step.costs.step_copies import Held, QuotaTables, divided, plan_step_among, quotas_of
from schedc.units import shown

_WHOLE = 1 << 20
"""Rows of a rank with the mean, where rows are given as factors: the form takes whole numbers."""


@dataclass(frozen=True, eq=False)
class RowsWithCopies:
    """Rows that ranks compute with copies of experts.

    factors: [layers or 1, microbatches or 1, ranks] rows over their mean. sent, held: [layers, microbatches, ranks]
    copies that a rank sends and holds; None where rows by expert are not known. lasting: whether they last for the
    step, and count as those of one microbatch. broadcast: whether each is sent to all ranks. links: as of
    `link_rows`; None where rows by expert are not known, and links carry what ranks compute.
    """

    factors: Floats
    sent: Int64 | None = None
    held: Int64 | None = None
    lasting: bool = False
    broadcast: bool = False
    links: Mapping[Lane, Floats] | None = None

    @property
    def busiest(self) -> Floats | None:
        """[layers, microbatches, ranks] copies on the fuller direction of each rank's links.

        Hot experts are broadcast one after the other.
        """
        if self.sent is None or self.held is None:
            return None
        return np.asarray(self.sent + self.held if self.broadcast else np.maximum(self.sent, self.held), np.float64)


def rows_with_copies(plan: Plan, costs: CellCosts, rows: CellRows) -> RowsWithCopies:
    """The rows under a plan with `balance`, or `hot` by step; as they are under other plans.

    With a capacity all ranks have equally many rows, padding included. Exchanges of bounded sizes send whole blocks.
    costs: times of cells, by which hot experts are chosen.
    """
    if plan.capacity is not None:
        return RowsWithCopies(np.ones_like(rows.factors))
    experts, rule = plan.experts, None
    if plan.hot is not None and not plan.hot.by_microbatch and experts and rows.ranks and plan.has_expert_sizes:
        rule = _hot_rule(plan, plan.hot, experts, costs, rows.ranks)
    copied = _rows_with_copies(plan, rule, rows)
    return copied if plan.bound is None else replace(copied, links=dict.fromkeys(LINKS, np.ones_like(copied.factors)))


@lru_cache(maxsize=8)
def _rows_with_copies(plan: Plan, rule: HotRule | None, rows: CellRows) -> RowsWithCopies:
    """rule: of hot experts by step; None where they are not chosen."""
    balance, record = plan.balance, rows.recorded
    if record is not None and record.by_expert is not None and not (plan.hot is not None and plan.hot.by_microbatch):
        return _repeated(_of_record(plan, rule, record.by_expert, record), record)
    if balance is None or balance.automatic or balance.in_place or balance.by == "step":
        return RowsWithCopies(rows.factors)
    within = Fraction(repr(balance.within))
    if rows.imbalance is not None:  # a rank with the mean takes none of these rows; how rows lie in nodes is not known
        most = max(1.0, float(within)) if _nodes(plan) == 1 else np.inf
        return RowsWithCopies(np.minimum(rows.factors, most))
    given = np.rint(rows.factors * _WHOLE).astype(np.int64)[..., None]
    return RowsWithCopies(over_mean(_computed(given, _evened(given, balance, _nodes(plan)))))


def _of_record(plan: Plan, rule: HotRule | None, steps: Int32, record: RecordedRows) -> RowsWithCopies:
    """The last recorded step with the copies of a plan, microbatches that repeat once. steps: rows by expert."""
    balance = plan.balance
    if balance is not None and not (balance.automatic or balance.in_place):
        if balance.by == "step":
            return _for_step(plan, balance, steps, record)
        return _by_microbatch(plan, balance, steps)
    if rule is not None:
        return _beside_hot(plan, rule, steps, record)
    return RowsWithCopies(record.factors, links=link_rows(plan, map(rows_between, steps[-1])))


def _repeated(copied: RowsWithCopies, record: RecordedRows) -> RowsWithCopies:
    """The rows of a whole step."""
    sent, held = (each if each is None else record.repeated(each) for each in (copied.sent, copied.held))
    links = {lane: record.repeated(table) for lane, table in (copied.links or {}).items()}
    return replace(copied, factors=record.repeated(copied.factors), sent=sent, held=held, links=links)


def _beside_hot(plan: Plan, rule: HotRule, steps: Int32, record: RecordedRows) -> RowsWithCopies:
    """The last recorded step, with the experts that are hot by the rows of the step before it.

    Rows of hot experts stay with their tokens. A record of one step gives both.
    """
    ranks, own = steps.shape[3], steps.shape[4] // steps.shape[3]
    computed, lent, between = [], [], []
    for before, now in zip(steps[0], steps[-1], strict=True):
        chosen = hot_of_step(record.over_step(before), rule, record.microbatches)
        computed.append(rows_beside_hot(now, chosen))
        lent.append(bincount(np.array(chosen, np.int64) // own, minlength=ranks))
        travels = ~np.isin(np.arange(steps.shape[4]), chosen)
        between.append(rows_between(now * travels) + np.eye(ranks, dtype=np.int64) * (now * ~travels).sum(2)[..., None])
    sent = np.array(lent)[:, None]
    held = sent.sum(axis=2, keepdims=True) - sent
    return RowsWithCopies(over_mean(np.stack(computed)), sent, held, True, True, link_rows(plan, between))


def _for_step(plan: Plan, balance: Balance, steps: Int32, record: RecordedRows) -> RowsWithCopies:
    """The last recorded step, with the copies that follow from the step before it: as the runtime plans and divides.

    A record of one step gives both.
    """
    homes = by_home(steps)
    ranks, own = homes.shape[3:]
    slots, peers = balance.copies(own, ranks), ranks // _nodes(plan)
    computed, sent, held, between = [], [], [], []
    for layer, (before, now) in enumerate(zip(homes[0], homes[-1], strict=True)):
        rows, squares = record.over_step(before).ravel().tolist(), record.over_step(np.square(before.sum(2))).tolist()
        copies = plan_step_among(rows, squares, record.microbatches, slots, peers)
        forest = _divided(now, copies, peers)
        computed.append(now.sum(-1) if forest is None else _computed(now, forest))
        between.append(rows_between(steps[-1, layer], forest))
        held.append([[len(experts) for experts in copies]])
        owners = [expert // own for experts in copies for expert in experts]
        sent.append([bincount(np.array(owners, np.int64), minlength=ranks)])
    load = over_mean(np.stack(computed))
    return RowsWithCopies(load, np.array(sent), np.array(held), True, links=link_rows(plan, between))


def _divided(rows: Int64, copies: Held, peers: int) -> Forest | None:
    """Who computes which rows with copies for the step; None without copies. rows: [microbatches, ranks, m] by home."""
    if not any(copies):
        return None
    parent, below, borrowed, peers = quotas_of(copies, rows.shape[-1], peers)
    return divided(NUMPY, rows, QuotaTables(np.array(parent), np.array(below), np.array(borrowed), peers))[0]


def _computed(rows: Int64, forest: Forest) -> Int64:
    """[..., ranks] rows that ranks compute. rows: [..., ranks, experts of a rank] by home."""
    return np.asarray(rows.sum(-1) + forest.taken - NUMPY.add(0 * forest.taken, forest.parent, forest.taken))


def over_mean(rows: Int64) -> Floats:
    """[...] rows over their mean; 1 without rows."""
    mean = rows.mean()
    return np.asarray(rows / mean if mean else np.ones(rows.shape))


def _hot_rule(plan: Plan, hot: Hot, experts: ExpertSizes, costs: CellCosts, ranks: int) -> HotRule:
    """The rule by which the runtime lends experts of a plan with their sizes."""
    width, number = experts.width, bytes_per_number(plan.dtype)
    most = experts.count // ranks if hot.most is None else hot.most
    return HotRule(most, hot.below, hot_break_even(width, number), HotTimes.of(costs, width, number, ranks))


def by_home(steps: Int32 | Int64) -> Int64:
    """[..., ranks, experts of a rank] rows by home, of [..., ranks, experts] by source rank."""
    homes = steps.sum(axis=-2, dtype=np.int64)
    return np.asarray(homes.reshape(*homes.shape[:-1], steps.shape[-2], -1))


def _nodes(plan: Plan) -> int:
    """The nodes inside of which rows move; 1 where they move among all ranks of the group."""
    nodes = plan.topology.nodes if plan.topology else 1
    return nodes if plan.balance is not None and plan.balance.inside_nodes(nodes) else 1


def _evened(rows: Int64, balance: Balance, nodes: int) -> Forest:
    """The plan inside each of the ``nodes``, with parents among all ranks.

    rows: [layers, microbatches, ranks, experts of a rank] by home.
    """
    layers, microbatches, ranks, own = rows.shape
    inside = rows.reshape(layers, microbatches, nodes, ranks // nodes, own)
    forest = forest_of(inside, Fraction(repr(balance.within)), balance.slots)
    parent = forest.parent + np.arange(0, ranks, ranks // nodes)[:, None]
    return Forest(
        parent.reshape(rows.shape[:3]), forest.taken.reshape(rows.shape[:3]), forest.quota.reshape(rows.shape)
    )


def _by_microbatch(plan: Plan, balance: Balance, steps: Int32) -> RowsWithCopies:
    """The last recorded step with copies by microbatch."""
    homes = by_home(steps[-1])
    forest = _evened(homes, balance, _nodes(plan))
    held = (forest.quota > 0).sum(-1)
    sent = NUMPY.add(0 * held, forest.parent, held)
    between = (rows_between(rows, Forest(*each)) for rows, *each in zip(steps[-1], *forest, strict=True))
    return RowsWithCopies(over_mean(_computed(homes, forest)), sent, held, links=link_rows(plan, between))


# ---- times of copies


def copied_rows(plan: Plan, costs: CellCosts, rows: CellRows) -> tuple[RowsWithCopies, SegmentTimes | None]:
    """What copies make of the rows, and the time of the exchange of copies: of the busiest rank, in the mean.

    None for copies that last for the step, and where the exchange has a time in the costs. None also where copies or
    their times are not known.
    """
    copied = rows_with_copies(plan, costs, rows)
    busiest, lane = None if copied.lasting else copied.busiest, lane_of(plan)
    one = None if f"hot.{lane}" in dict(costs.exchanges) or busiest is None else copy_time(plan, costs)
    if one is None or busiest is None:
        return copied, None
    most = float(busiest.max(axis=2).mean())
    return copied, SegmentTimes(one.forward * most, one.input_gradient * most)


def step_copies(plan: Plan, costs: CellCosts, copied: RowsWithCopies) -> StepCopies | None:
    """The exchanges of copies that last for a step; None without any, or where plan or costs do not say their time."""
    busiest, one = copied.busiest, copy_time(plan, costs)
    if not copied.lasting or busiest is None or one is None or not busiest.any():
        return None
    most, ranks, nodes = busiest.max(axis=(1, 2)), busiest.shape[2], _nodes(plan)
    members = None if nodes == 1 else tuple(map(tuple, np.arange(ranks).reshape(nodes, -1).tolist()))
    return StepCopies(
        lane_of(plan), members, *(tuple((most * time).tolist()) for time in (one.forward, one.input_gradient))
    )


# ---- facts and text


def copies_facts(plan: Plan, costs: CellCosts, rows: CellRows) -> dict[str, Any]:
    """What copies make of the rows. fullest, after: rows of the fullest rank over the mean, without and with copies:
    the mean over layers and microbatches, and the worst.

    sent, held: mean copies of the busiest home and on a rank, in a layer. per: whether in a microbatch or in a step.
    hot: mean number of experts of a layer that are lent to all ranks. foreseen: whether copies for a step follow the
    rows of the step before. bytes: of copies that leave the busiest home, there and back. slots: [layers] bytes of
    copies on the rank that holds most of them. rows: the most that a rank computes in a layer and microbatch. Null
    where the rows or the plan say too little. unpriced: why the copies take no time in the step, or null.
    """
    copied, time = copied_rows(plan, costs, rows)
    before, after = (_fullest(factors, rows) for factors in (rows.factors, copied.factors))
    facts: dict[str, Any] = {
        "fullest": before,
        "after": after,
        "sent": None,
        "held": None,
        "bytes": None,
        "slots": None,
    }
    if copied.sent is not None and copied.held is not None and copied.busiest is not None:
        facts |= {"sent": float(copied.sent.max(axis=2).mean()), "held": float(copied.held.mean())}
        most = float((copied.busiest if copied.broadcast else copied.sent).max(axis=2).mean())
        facts["bytes"] = most * sum(copy_bytes(plan)) if plan.has_expert_sizes else None
        facts["slots"] = _slots(plan, copied.held, copied.lasting) if plan.has_expert_sizes else None
    facts["per"] = "step" if copied.lasting else "microbatch"
    facts["hot"] = float(copied.sent.sum(axis=2).mean()) if copied.broadcast and copied.sent is not None else None
    record = None if rows.recorded is None else rows.recorded.by_expert
    facts["foreseen"] = record is not None and len(record) > 1
    mean = None if record is None or rows.recorded is None else float(rows.recorded.rows.mean())
    facts["rows"] = None if mean is None else round(copied.factors.max() * mean)
    return facts | {"unpriced": _unpriced(plan, costs, copied, time, record is not None)}


def _slots(plan: Plan, held: Int64, lasting: bool) -> list[int]:
    """[layers] bytes of slots: weights, and for a step the sums of gradients. held: [layers, microbatches, ranks]."""
    weights, gradients = copy_bytes(plan)
    return [int(most) * (weights + gradients * lasting) for most in held.max(axis=(1, 2))]


def _unpriced(
    plan: Plan, costs: CellCosts, copied: RowsWithCopies, time: SegmentTimes | None, by_expert: bool
) -> str | None:
    """Why copies take no time in the price; None where they do. by_expert: whether rows are known by expert."""
    lane, balance = lane_of(plan), plan.balance
    if (balance is None and plan.hot is None) or (balance is not None and balance.in_place):
        return None
    if plan.hot is not None and plan.hot.by_microbatch:
        return "hot experts by microbatch are not priced, and rows are those without them"
    if time is not None or (f"hot.{lane}" in dict(costs.exchanges) and not copied.lasting):
        return None
    if copied.sent is None and plan.hot is not None and by_expert:
        if plan.capacity is not None:
            return "with a capacity all ranks have equally many rows, and no expert is lent"
        return "that needs the sizes of `experts`, and rows are those without copies"
    if copied.sent is None:
        without = "" if plan.copies_by_microbatch else ", and are those without copies"
        return f"the rows say no experts{without}: record them with `Pipeline.record_routing`"
    if not copied.sent.any() or step_copies(plan, costs, copied) is not None:
        return None
    return f"that needs `tokens`, the sizes of `experts`, and `dispatch.{lane}` in the table [cell]"


def _fullest(factors: Floats, rows: CellRows) -> dict[str, float]:
    """By the mean of the ranks; an imbalance is over it already, and does not give all ranks."""
    mean = np.ones(1) if rows.imbalance is not None else np.maximum(factors.mean(axis=2), 1e-300)
    most = factors.max(axis=2) / mean
    return {"mean": float(most.mean()), "worst": float(most.max())}


def copies_text(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people."""
    before, after = facts["fullest"], facts["after"]
    size = "" if facts["bytes"] is None else f", {shown(facts['bytes'])} there and back"
    size += " in a step" if facts["per"] == "step" else ""
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
