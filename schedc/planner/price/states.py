"""Parameters of the kinds of parts, and what ranks hold, sum and update of them, for many plans at once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.model.counts import layer_parameters, model_parameters, without_experts
from schedc.model.parts import PartName
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.model.spread import Spread
from schedc.plan.layout.parts import DECODER, WORK, PartKind
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import ReplicaLinks
from schedc.planner.times.table import LevelColumns, RunTable

WEIGHT, GRADIENT, STATES = 2.0, 4.0, 12.0
"""Bytes of a parameter: its weight, its summed gradient, and master weight with two moments of Adam."""

OPTIMIZER_BYTES = 28.0
"""Bytes per parameter that Adam reads and writes: gradient, master weight and two moments of 4, weight of 2."""


@lru_cache(maxsize=256)
def kind_parameters(model: ModelSizes, one_stage: bool = False, tp: int = 1) -> Floats:
    """[kinds, 2] parameters of a part of each kind on ``tp`` tensor ranks: outside of experts, and in experts.

    A head that uses the embedding has a copy of it, and so has a prediction, unless all are in one stage.
    """
    outside, kinds = model_parameters(model).outside, model.kinds
    word = outside[PartName.EMBEDDING]
    head = outside.get(PartName.HEAD, 0 if one_stage else word) + outside.get(PartName.NORMS, 0)
    counts = {PartKind.EMBEDDING: (word, 0), PartKind.HEAD: (head, 0)}
    for kind, layer in ((PartKind.DENSE, LayerKind.DENSE), (PartKind.MOE, LayerKind.MOE)):
        if layer in kinds:
            counts[kind] = without_experts(layer_parameters(model, kinds.index(layer), tp))
    if model.mtp:
        own, experts = without_experts(layer_parameters(model, model.layers, tp))
        counts[PartKind.MTP] = own if one_stage else own + word, experts
    return np.array([counts.get(kind, (0, 0)) for kind in WORK], np.float64)


AnySpread: TypeAlias = Spread[int] | Spread[Floats]


def parameter_bytes(spread: AnySpread) -> tuple[Floats, Floats]:
    """Bytes that a device holds per parameter of its dense parts, and of its experts: weight, gradient, optimizer."""

    def of(replicas: Floats | int) -> Floats:
        shards = [np.where(np.asarray(spread.zero) >= least, replicas, 1.0) for least in (3, 2, 1)]
        return np.asarray(WEIGHT / shards[0] + GRADIENT / shards[1] + STATES / shards[2])

    return of(spread.replicas), of(spread.expert_replicas)


def held_parameters(parameters: Floats, spread: AnySpread) -> Floats:
    """[..., kinds] bytes that a device holds of the parameters of a part of each kind.

    parameters: [kinds, 2] or [..., kinds, 2], by `kind_parameters`.
    """
    own, experts = parameters[..., 0], parameters[..., 1]
    dense, expert = parameter_bytes(spread)
    return np.asarray((dense / spread.tp)[..., None] * own + (expert / spread.ep)[..., None] * experts)


def gathered_bytes(parameters: Floats, spread: AnySpread) -> Floats:
    """[...] bytes of weights that level 3 holds whole for a moment: of the largest part, and of a layer ahead of it.

    parameters: as for `held_parameters`.
    """
    own, experts = parameters[..., 0], parameters[..., 1]
    dense, expert = (1.0 / np.asarray(ranks, np.float64)[..., None] for ranks in (spread.tp, spread.ep))
    parts = WEIGHT * (dense * own + expert * experts)
    layers = parts[..., [kind in DECODER for kind in WORK]]
    return np.where(np.asarray(spread.zero) >= 3, parts.max(axis=-1) + layers.max(axis=-1), 0.0)


class RankLoads(NamedTuple):
    """What decides of a rank how long a step is beside its pipeline; numbers, or arrays that broadcast.

    own, experts: parameters of the fullest device without its experts, and of its experts. layers: of the rank that has
    most. late, busy: [2, ...] seconds in which rows and messages keep the links of a node, and the NICs, busy. late: in
    the last backward of a rank. busy: in a whole microbatch.
    """

    own: Floats
    experts: Floats
    layers: Floats
    late: Floats
    busy: Floats


_BACKWARD = 0.5
"""Share of a microbatch in which a rank computes gradients, at least: forward and recomputation take as long."""


class OutsidePipeline(NamedTuple):
    """Seconds of a step beside its pipeline; arrays that broadcast. gradients: their exposed sums. host: of a step."""

    gradients: Floats | float
    optimizer: Floats | float
    host: Floats | float

    def step_of(self, pipeline: Floats | float) -> Floats:
        """[...] seconds of a step. pipeline: [...] seconds of the pipeline."""
        return np.asarray(pipeline + self.gradients + self.optimizer + self.host)


class Machine(NamedTuple):
    """What sums of gradients and the optimizer run on; arrays that broadcast, [runs, K].

    links: of replicas. memory: bytes per second that the optimizer reaches. step, host: seconds of the host in each
    step, and more for each layer of the rank that has most. grad_bytes: of a gradient as it is summed. overlap: whether
    sums run beside backwards.
    """

    links: ReplicaLinks
    memory: Floats
    step: Floats
    host: Floats
    grad_bytes: Floats
    overlap: Floats

    @classmethod
    def of(cls, runs: RunTable, constants: ConstantVectors) -> Machine:
        """That of runs under constants: [runs, K]."""
        links = ReplicaLinks(runs.levels, constants["tp"], constants["dp"])
        grad_bytes = runs.once("grad_bytes", lambda: runs.column(lambda run: run.problem.stack.grad_bytes))[:, None]
        return cls(
            links,
            runs.hbm[:, None] * constants["hbm"],
            constants["step"],
            constants["host"],
            grad_bytes,
            np.where(runs.flag("overlap"), 1.0, 0.0),
        )

    def of_runs(self, runs: Int64) -> Machine:
        """That of some of the runs, [n] their numbers."""

        def own(column: Floats | float) -> Floats:
            whole = np.asarray(column)
            return whole[runs] if len(whole) > 1 else whole

        levels = tuple(LevelColumns(*map(own, level)) for level in self.links.levels)
        links = ReplicaLinks(levels, own(self.links.inside), own(self.links.beside))
        columns = self.memory, self.step, self.host, self.grad_bytes, self.overlap
        return Machine(links, *map(own, columns))


def outside_pipeline(
    machine: Machine,
    spread: AnySpread,
    loads: RankLoads,
    microbatches: Floats | int,
    pipeline: Floats | float,
) -> OutsidePipeline:
    """Seconds of a step outside of the pipeline.

    pipeline: seconds of the pipeline. Sums of gradients run beside the last backward of a rank, and not beside its
    rows and messages, which take the same network. A backward is a share of the pipeline that no constant decides. So
    no speed makes a step longer: what sums cannot hide any more, the pipeline has saved. Level 2 sums gradients in
    every microbatch, level 3 gathers parameters twice on top: compute of the microbatch hides them.
    """
    links, own, experts = machine.links, loads.own / spread.tp, loads.experts / spread.ep
    replicas, apart = (np.asarray(each, np.float64) for each in (spread.replicas, spread.stride("cp")))
    far = links.levels[0].members(replicas, apart) < replicas
    late, busy = (np.where(far, over, inside) for inside, over in (loads.late, loads.busy))
    zero, count = np.asarray(spread.zero), np.asarray(microbatches, np.float64)
    backward = _BACKWARD / (count + spread.pp - 1.0) * pipeline
    hidden = np.where(machine.overlap > 0, np.maximum(0.0, backward - late), 0.0)
    width = machine.grad_bytes + np.where(zero >= 1, WEIGHT, machine.grad_bytes)

    whole = links.seconds(own * width, replicas, apart)
    whole = whole + links.seconds(experts * width, spread.expert_replicas, np.asarray(spread.ep, np.float64))
    scattered = whole * machine.grad_bytes / width
    gathered = whole * WEIGHT / width
    once = np.maximum(0.0, whole - hidden)
    level_2 = count * np.maximum(0.0, scattered - hidden) + gathered
    level_3 = count * np.maximum(0.0, scattered + 2.0 * gathered + busy - pipeline / count)
    gradients = np.where(zero >= 3, level_3, np.where(zero == 2, np.maximum(once, level_2), once))
    shards = [np.where(zero >= 1, ranks, 1.0) for ranks in (spread.replicas, spread.expert_replicas)]
    states = OPTIMIZER_BYTES * (own / shards[0] + experts / shards[1])
    host = machine.step + machine.host * loads.layers
    return OutsidePipeline(np.asarray(gradients), np.asarray(states / machine.memory), np.asarray(host))
