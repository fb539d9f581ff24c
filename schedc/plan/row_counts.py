"""What follows from a plan's own figures: which All-to-All, and how many rows travel and arrive."""

from __future__ import annotations

from schedc.cost.exchange import METHODS, MethodChoice, Routing, RowTraffic, arrivals, capacity_rows, choose, rows
from schedc.plan.recompute_bytes import RowsPerToken
from schedc.plan.values import Attachments, ExpertSizes, Method


def routing_of(experts: ExpertSizes) -> Routing:
    return Routing(experts.count, experts.top, experts.groups, experts.limit)


def chosen_method(plan: Attachments) -> MethodChoice | None:
    """What `alltoall auto` becomes, and why; None where it is not asked for, or the ranks are not known yet."""
    if plan.method is not Method.AUTO or plan.experts is None or plan.topology is None:
        return None
    row = float(max(plan.row_bytes, 1) * max(plan.tokens, 1))
    return choose(routing_of(plan.experts), plan.topology, row)


def travelling_rows(plan: Attachments) -> dict[str, RowTraffic]:
    """Rows per token that a rank sends in one dispatch, by method; empty where the plan does not say enough."""
    if plan.experts is None or plan.topology is None:
        return {}
    moved = {method: rows(method, routing_of(plan.experts), plan.topology) for method in METHODS}
    return {method: value for method, value in moved.items() if value is not None}


def arriving_rows(plan: Attachments) -> float | None:
    """Rows that a rank gets per token of its own in one dispatch; None where that is not known."""
    if plan.experts is None or plan.topology is None or plan.method is Method.AUTO:
        return None
    return arrivals(plan.method, routing_of(plan.experts), plan.topology)


def worst_case_rows(plan: Attachments) -> RowsPerToken | None:
    """The most rows that can come to a rank, per token of its own; None where the plan does not say enough.

    Without a capacity all tokens of the group may come, each with as many rows as the rank has experts for. Hot
    experts keep a rank's own rows with it, beside what may still come. With a capacity there are as many rows, with
    padding, whatever the routing.
    """
    if plan.experts is None or plan.topology is None:
        return None
    top, ranks = plan.experts.top, plan.topology.ranks
    own = max(1, plan.experts.count // ranks)
    flat = plan.method in (Method.FLAT, Method.AUTO)
    if plan.capacity is not None:
        if not plan.tokens:
            return None
        slots = capacity_rows(plan.tokens, routing_of(plan.experts), plan.capacity.factor)
        computed = plan.experts.count * slots
        arrived = computed if flat else ranks * min(plan.tokens, own * slots)
        return RowsPerToken(computed / plan.tokens, arrived / plan.tokens)
    computed = ranks * min(top, own)
    if plan.hot is not None:
        computed = min(ranks * top, (ranks - 1) * min(top, own) + top)
    return RowsPerToken(computed, computed if flat else min(ranks, computed))
