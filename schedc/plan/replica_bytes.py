"""Counts what replicas of a stage sum and shard: bytes of dense parameters, of experts and of tied weights."""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.plan import Plan, bytes_per_number
from schedc.ir.schedule import Schedule
from schedc.ir.ties import lies_apart
from schedc.ir.works import WorkGroup
from schedc.plan.counts.parameters import expert_share
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.parts import WORK, Layout, PartKind
from schedc.step.works.place_replica_works import ReplicaBytes


def weight_share(plan: Plan) -> float:
    """Share of a part's parameters, in bytes, that weights take; gradients take as many. The rest is the `states`."""
    weight = bytes_per_number(plan.dtype)
    return weight / (weight + plan.states)


def group_sizes(plan: Plan, replicas: int) -> dict[WorkGroup, int]:
    """How many replicas take part in a work of each group."""
    ranks = plan.topology.ranks if plan.topology and plan.experts else 1
    return {WorkGroup.REPLICAS: replicas, WorkGroup.SAME_EXPERTS: max(1, replicas // ranks)}


def dense_parameters(plan: Plan, layout: Layout, layers: LayerCosts) -> Floats:
    """[stages] memory of all parameters but experts, with their `states`."""
    kinds = layout.counts[:, : len(WORK)] * np.array(layers.parameters, np.float64)
    share = np.array([1 - expert_share(plan, kind) for kind in WORK])
    return np.asarray(kinds @ share)


def replica_bytes(plan: Plan, layout: Layout, layers: LayerCosts, schedule: Schedule) -> ReplicaBytes:
    """What replicas sum and shard, in the unit of ``layers``.

    The table of a tied embedding is that of the embedding, on each stage that uses it. Stages that share all their
    ranks have one table there.
    """
    weights = weight_share(plan)
    dense = dense_parameters(plan, layout, layers) * weights
    whole = layers.per_stage(layout, "parameters") * weights
    experts = whole - dense
    last = np.zeros(dense.size)
    for tie in schedule.tied:
        if lies_apart(tie, schedule.placement):
            stages = list(tie.stages)
            last[stages] = layers.parameters.embedding * weights
    own = np.array([layout.counts[stage, WORK.index(PartKind.EMBEDDING)] > 0 for stage in range(dense.size)])
    head = layout.counts[:, WORK.index(PartKind.HEAD)] * layers.parameters.head * weights
    counted = np.where(last > 0, np.where(own, last, np.minimum(head, last)), 0.0)
    free = np.maximum(dense - counted, 0.0)
    nothing = np.zeros(dense.size)
    return ReplicaBytes(nothing if plan.shard_dense else free, experts, free if plan.shard_dense else nothing, last)
