"""Parameters of the kinds of parts, and what ranks hold, sum and update of them, for many plans at once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from schedc.ir.arrays import Floats
from schedc.model.counts import Counts, layer_parameters, model_parameters, without_experts
from schedc.model.parts import PartName
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.model.spread import Spread
from schedc.plan.layout.parts import DECODER, WORK, PartKind
from schedc.planner.price.problem import GRAD_BYTES, PlanProblem
from schedc.planner.times.network import ReplicaLinks
from schedc.planner.times.states import OPTIMIZER_BYTES

WEIGHT, GRADIENT, STATES = 2.0, 4.0, 12.0
"""Bytes of a parameter: its weight, its summed gradient, and master weight with two moments of Adam."""


@lru_cache(maxsize=64)
def kind_parameters(model: ModelSizes, one_stage: bool = False) -> Floats:
    """[kinds, 2] parameters of a part of each kind: without its experts, and of its experts.

    A head that uses the embedding has a copy of it, and so has a prediction, unless all are in one stage.
    """
    outside, kinds = model_parameters(model).outside, model.kinds
    word = outside[PartName.EMBEDDING]
    head = outside.get(PartName.HEAD, 0 if one_stage else word) + outside.get(PartName.NORMS, 0)
    layers = {kind: layer_parameters(model, kinds.index(kind)) for kind in LayerKind if kind in kinds}
    of_kind: dict[PartKind, Counts] = {
        PartKind.DENSE: layers.get(LayerKind.DENSE, {}),
        PartKind.MOE: layers.get(LayerKind.MOE, {}),
        PartKind.MTP: layer_parameters(model, model.layers) if model.mtp else {},
    }
    if model.mtp and not one_stage:
        of_kind[PartKind.MTP] = {**of_kind[PartKind.MTP], PartName.EMBEDDING: word}
    whole = {PartKind.EMBEDDING: (word, 0), PartKind.HEAD: (head, 0)}
    return np.array([whole.get(kind) or without_experts(of_kind[kind]) for kind in WORK], np.float64)


AnySpread: TypeAlias = Spread[int] | Spread[Floats]


def parameter_bytes(spread: AnySpread) -> tuple[Floats, Floats]:
    """Bytes that a device holds per parameter of its dense parts, and of its experts: weight, gradient, optimizer."""

    def of(replicas: Floats | int) -> Floats:
        shards = [np.where(np.asarray(spread.zero) >= least, replicas, 1.0) for least in (3, 2, 1)]
        return np.asarray(WEIGHT / shards[0] + GRADIENT / shards[1] + STATES / shards[2])

    return of(spread.replicas), of(spread.expert_replicas)


def held_parameters(model: ModelSizes, spread: AnySpread, one_stage: bool = False) -> Floats:
    """[..., kinds] bytes that a device holds of the parameters of a part of each kind."""
    own, experts = kind_parameters(model, one_stage).T
    dense, expert = parameter_bytes(spread)
    return np.asarray(np.multiply.outer(dense / spread.tp, own) + np.multiply.outer(expert / spread.ep, experts))


def gathered_bytes(model: ModelSizes, spread: AnySpread, one_stage: bool = False) -> Floats:
    """[...] bytes of weights that level 3 holds whole for a moment: of the largest part, and of a layer ahead of it."""
    own, experts = kind_parameters(model, one_stage).T
    dense, expert = (1.0 / np.asarray(ranks, np.float64) for ranks in (spread.tp, spread.ep))
    parts = WEIGHT * (np.multiply.outer(dense, own) + np.multiply.outer(expert, experts))
    layers = parts[..., [kind in DECODER for kind in WORK]]
    return np.where(np.asarray(spread.zero) >= 3, parts.max(axis=-1) + layers.max(axis=-1), 0.0)


class RankLoads(NamedTuple):
    """What decides of a rank how long a step is beside its pipeline; numbers, or arrays of one shape.

    own, experts: parameters of the fullest device without its experts, and of its experts. backward: seconds that
    the last backward of a rank computes, the least. late, busy: [2, ...] seconds in which rows and messages keep the
    links of a node, and the NICs, busy. late: in the last backward of a rank. busy: in a whole microbatch.
    """

    own: Floats
    experts: Floats
    backward: Floats
    late: Floats
    busy: Floats


class OutsidePipeline(NamedTuple):
    """Seconds of a step beside its pipeline; numbers, or [plans] each. gradients: their exposed sums."""

    gradients: Floats
    optimizer: Floats
    step: float


def outside_pipeline(
    problem: PlanProblem,
    spread: AnySpread,
    loads: RankLoads,
    microbatches: Floats | int,
    pipeline: Floats | float,
) -> OutsidePipeline:
    """What a step takes beside its pipeline.

    pipeline: seconds of the pipeline. Sums of gradients run beside the last backward of a rank, and not beside its
    rows and messages, which take the same network. Level 2 sums gradients in every microbatch, level 3 gathers
    parameters twice on top: what a microbatch computes hides them.
    """
    links, own, experts = _links(problem), loads.own / spread.tp, loads.experts / spread.ep
    far = spread.replicas * spread.tp > links.near
    late, busy = (np.where(far, over, inside) for inside, over in (loads.late, loads.busy))
    hidden = np.maximum(0.0, loads.backward - late)
    zero, count = np.asarray(spread.zero), np.asarray(microbatches, np.float64)
    width = GRAD_BYTES + np.where(zero >= 1, WEIGHT, float(GRAD_BYTES))

    whole = links.seconds(own * width, np.asarray(spread.replicas, np.float64), np.asarray(spread.tp, np.float64))
    whole = whole + links.seconds(experts * width, spread.expert_replicas, np.asarray(spread.ep, np.float64))
    scattered = whole * GRAD_BYTES / width
    gathered = whole * WEIGHT / width
    once = np.maximum(0.0, whole - hidden)
    level_2 = count * np.maximum(0.0, scattered - hidden) + gathered
    level_3 = count * np.maximum(0.0, scattered + 2.0 * gathered + busy - pipeline / count)
    gradients = np.where(zero >= 3, level_3, np.where(zero == 2, np.maximum(once, level_2), once))
    shards = [np.where(zero >= 1, ranks, 1.0) for ranks in (spread.replicas, spread.expert_replicas)]
    states = OPTIMIZER_BYTES * (own / shards[0] + experts / shards[1])
    optimizer = states / (problem.cluster.device.hbm_Bps * problem.constant("hbm"))
    return OutsidePipeline(np.asarray(gradients), np.asarray(optimizer), problem.constant("step"))


def _links(problem: PlanProblem) -> ReplicaLinks:
    cluster = problem.cluster
    outer = cluster.levels[1] if len(cluster.levels) > 1 else cluster.levels[0]
    inner = cluster.levels[0]
    return ReplicaLinks(
        inner.size, cluster.device_Bps(inner), cluster.device_Bps(outer), inner.alpha_s, outer.alpha_s,
        problem.constant("tp"), problem.constant("dp"),
    )  # fmt: skip
