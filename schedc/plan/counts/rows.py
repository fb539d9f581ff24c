"""Computes from a plan's figures which All-to-All it takes, and how many rows travel and arrive."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from schedc.ir.plan import Balance, ExpertSizes, Method, Plan, Topology
from schedc.model.layer import RowsPerToken
from schedc.step.costs.exchange import (
    METHODS,
    MethodChoice,
    Routing,
    RowTraffic,
    arrivals,
    capacity_rows,
    choose_method,
    rows,
)


def routing_of(experts: ExpertSizes) -> Routing:
    """The routing of experts, for `schedc.step.costs.exchange`."""
    return Routing(experts.count, experts.top, experts.groups, experts.limit)


def chosen_method(plan: Plan) -> MethodChoice | None:
    """The method that `alltoall auto` chooses, and why; None for another method, or where the ranks are not known."""
    if plan.method is not Method.AUTO or plan.experts is None or plan.topology is None:
        return None
    return choose_method(routing_of(plan.experts), plan.topology, plan.dispatch_bytes)


def travelling_rows(plan: Plan) -> dict[str, RowTraffic]:
    """Rows per token that a rank sends in one dispatch, by method; empty where the plan says too little."""
    if plan.experts is None or plan.topology is None:
        return {}
    return {method: rows(method, routing_of(plan.experts), plan.topology) for method in METHODS}


def arriving_rows(plan: Plan) -> float | None:
    """Rows that a rank gets per token of its own in one dispatch; None where the plan says too little."""
    if plan.experts is None or plan.topology is None or plan.method is Method.AUTO:
        return None
    return arrivals(plan.method, routing_of(plan.experts), plan.topology)


def buffer_factor(plan: Plan) -> float:
    """Rows that a rank's buffers hold over the mean number: those of bounded sizes, else 1."""
    return plan.bound or 1.0


def expert_buffers(plan: Plan) -> int:
    """Buffers of a rank's experts: beside bounded sizes rows of a step's copies lie in one of their own."""
    return 2 if plan.bound is not None and plan.balance is not None and plan.balance.by == "step" else 1


def worst_case_rows(plan: Plan) -> RowsPerToken | None:
    """The most rows that can come to a rank, per token of its own; None where the plan says too little.

    Without a capacity, all tokens of the group may come, each with as many rows as the rank has experts for. Hot
    experts keep the rank's own rows with it; rows of other ranks may come on top. With a capacity the number of rows is
    fixed, with padding, for every routing. Copies of experts may leave more rows to a rank than its own experts have.
    With bounded sizes as many may come as without, in a step that runs again.
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
    if (even := _even_rows(plan)) is not None:
        return RowsPerToken(*[min(float(computed), float(even))] * 2)
    if plan.balance is not None and not plan.balance.in_place:
        computed = max(computed, _taken_rows(plan))
        return RowsPerToken(computed, computed)  # rows of two hops may travel alone
    if plan.hot is not None:
        computed = min(ranks * top, (ranks - 1) * min(top, own) + top)
    return RowsPerToken(computed, computed if flat else min(ranks, computed))


def most_computed(plan: Plan) -> int | None:
    """The most rows of a microbatch that a rank can compute; None where the plan says too little."""
    worst = worst_case_rows(plan)
    if worst is None or plan.experts is None or not plan.tokens:
        return None
    even = _even_rows(plan)
    if even is not None and float(even) == worst.experts:
        return ceil(even * plan.tokens)  # a product of floats may be a little above a whole number
    return ceil(worst.experts * plan.tokens)


def _even_rows(plan: Plan) -> Fraction | None:
    """Rows per token that copies of a microbatch leave to a rank at most; None without such copies."""
    if plan.experts is None or plan.topology is None or plan.balance is None or plan.capacity is not None:
        return None
    if not plan.balance.evens(plan.experts.count // plan.topology.ranks):
        return None
    return _mean_rows(plan.experts, plan.topology, plan.balance) * Fraction(repr(plan.balance.within))


def _mean_rows(experts: ExpertSizes, topology: Topology, balance: Balance) -> int:
    """Rows per token of a rank of the ranks among which rows move, in the mean, where all tokens choose their
    experts."""
    groups = topology.ranks // balance.peers(topology.nodes, topology.per_node)
    return groups * min(experts.top, experts.count // groups)


def _taken_rows(plan: Plan) -> int:
    """The most rows per token of a rank that takes rows of others by copies of a step; 0 without such copies.

    It may take what it lacks, and all ranks below it: R - 1 ranks at most. Where copies let these take none of its own,
    it has the mean rows of all.
    """
    if plan.experts is None or plan.topology is None or plan.balance is None or plan.balance.by == "microbatch":
        return 0
    ranks = plan.balance.peers(plan.topology.nodes, plan.topology.per_node)
    return (ranks - 1) * _mean_rows(plan.experts, plan.topology, plan.balance)
