"""The memory of the ranks of a run: weights, gradients, optimizer, held tensors by the schedule's order, the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Floats
from schedc.model.layer import Layer
from schedc.model.sizes import LayerKind
from schedc.planner.times.orders import order_of, ordered_by
from schedc.planner.times.run import TrainingRun
from schedc.planner.times.states import rank_parameters
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory

_WEIGHT, _GRADIENT, _STATES = 2.0, 4.0, 12.0
"""Bytes of a parameter: its weight, its summed gradient, and master weight with two moments."""

_LOGIT = 2.0 + 4.0
"""Bytes of an entry of the logits: in 16 bits, and as the loss computes with it."""


@dataclass(frozen=True, eq=False)
class RankMemory:
    """[pp] bytes of each rank of a pipeline.

    states: weights, gradients and optimizer. held: tensors held for backwards, at the peak of the order. temporary: the
    largest gradients that no order counts.
    """

    states: Floats
    held: Floats
    temporary: Floats

    @property
    def total(self) -> Floats:
        return self.states + self.held + self.temporary


def rank_memory(run: TrainingRun) -> RankMemory:
    """The memory of a run. The counts of microbatches in flight come from the order, not from a formula."""
    costs = Costs(activation=tuple(held_of_stages(run)), pending_weight=tuple(held_of_stages(run)))
    if run.limit:
        order = ordered_by(run.schedule, run.pp, run.microbatches, run.vpp, run.limit, None)
    else:
        order = order_of(run.schedule, run.pp, run.microbatches, run.vpp)
    held = measure_memory(order.schedule, costs, order).peak_memory
    return RankMemory(_states(run), np.asarray(held), _temporary(run))


def held_of_stages(run: TrainingRun) -> list[float]:
    """[stages] bytes that a microbatch holds on each stage: the tensors of the layers, and the input of the head."""
    rows = run.tokens / run.tp
    each = {kind: _held_of_layer(run, kind) for kind in LayerKind}
    held = [rows * sum(each[run.model.kind_of(layer)] for layer in layers) for layers in run.layer_ranges()]
    held[-1] += rows * 2.0 * 2.0 * run.model.hidden
    return held


def _held_of_layer(run: TrainingRun, kind: LayerKind) -> float:
    """Bytes per row; without sequence parallelism inputs of norms and products are whole on every tensor rank."""
    model = run.model
    if run.recomputes_layers:
        return 2.0 * model.hidden * (1 if run.sequence_parallel else run.tp)
    held = Layer(model, kind).held()
    whole = 0.0 if run.sequence_parallel else (run.tp - 1) * 2.0 * model.hidden * 4
    drop = 2.0 * model.hidden * (1 if run.sequence_parallel else run.tp) if run.dropout else 0.0
    scores = 0.0
    if not run.fused and not run.recomputes_scores:
        scores = model.attention.heads * model.seq * (4.0 + (1.0 if run.dropout else 0.0))
    return held + whole + drop + scores


def _temporary(run: TrainingRun) -> Floats:
    """[pp] bytes at the first product of a backward: its weight gradient and that of its result, in 16 bits.

    On the rank of the head this product is the head, whose logits are held in both types.
    """
    model = run.model
    columns = max(model.ffn * (1 + model.gated), model.attention.heads * model.attention.score_dim) / run.tp
    head = model.vocab / run.tp
    inside = 2.0 * columns * (model.hidden + run.tokens)
    at_head = 2.0 * head * model.hidden + _LOGIT * head * run.tokens
    return np.array([inside] * (run.pp - 1) + [max(inside, at_head)])


def _states(run: TrainingRun) -> Floats:
    replicas = run.dp * run.cp
    dense = replicas if run.zero else 1
    experts = max(1.0, replicas * run.tp / run.ep) if run.zero else 1
    bytes = [
        own * (_WEIGHT + _GRADIENT + _STATES / dense) + expert * (_WEIGHT + _GRADIENT + _STATES / experts)
        for own, expert in rank_parameters(run)
    ]
    return np.array(bytes) / (dense if run.fully_sharded else 1)
