"""Time, bytes and lane of one copy of an expert, as plan and costs say."""

from __future__ import annotations

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import Lane
from schedc.ir.plan import Plan
from schedc.plan.counts.layers import moe_layer
from schedc.plan.counts.rows import chosen_method, travelling_rows


def copy_time(plan: Plan, costs: CellCosts) -> SegmentTimes | None:
    """Time of one copy, there and back, in the unit of the costs; None where plan or costs say too little.

    The lane of the rows carries it as fast as it carries these: a dispatch of `flat` moves (R - 1) / R of the mean
    rows of R ranks. A dispatch of two hops moves the rows of its second hop. Where rows of one hop take the rail, and
    copies stay in their node, the speeds of the topology say how much faster these are.
    """
    lane, faster, exchanges = lane_of(plan), 1.0, dict(costs.exchanges)
    dispatch, topology = exchanges.get(f"dispatch.{lane}"), plan.topology
    if dispatch is None and topology is not None and topology.rail and topology.node:
        dispatch, faster = exchanges.get(f"dispatch.{Lane.RAIL}"), topology.node / topology.rail
    experts, ranks = plan.experts, topology.ranks if topology else 0
    if dispatch is None or experts is None or not (plan.has_expert_sizes and plan.tokens and ranks > 1):
        return None
    choice, travelling = chosen_method(plan), travelling_rows(plan)
    method = choice.method if choice else str(plan.method)
    of_token = experts.top * (ranks - 1) / ranks if method == "flat" else getattr(travelling[method], lane.value)
    rows = plan.tokens * of_token
    per_byte = dispatch.forward / (rows * plan.dispatch_row_bytes * faster)
    weights, gradients = copy_bytes(plan)
    return SegmentTimes(per_byte * weights, per_byte * gradients)


def copy_by_itself(plan: Plan, costs: CellCosts) -> tuple[str, SegmentTimes] | None:
    """The exchange of copies by microbatch while orders inside cells are found: that of one copy.

    Numbers of copies are known when cells run. None without such copies, where the costs have the exchange, and where
    its time is not known.
    """
    name = f"hot.{lane_of(plan)}"
    if plan.balance is None or not plan.copies_by_microbatch or name in dict(costs.exchanges):
        return None
    time = copy_time(plan, costs)
    return None if time is None else (name, time)


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
