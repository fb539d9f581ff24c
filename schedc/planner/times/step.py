"""The time of a step: stages from their parts, the schedule's order simulated, sums of gradients, the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import exchange_lanes, gradient_sum, message
from schedc.planner.times.orders import order_of, ordered_by
from schedc.planner.times.parts import PartTimes, dense_layer, embedding, head, moe_layer
from schedc.planner.times.run import TrainingRun
from schedc.planner.times.states import OPTIMIZER_BYTES, dense_parameters, expert_parameters
from schedc.planner.times.table import RunTable
from schedc.step.batch import simulate_batch
from schedc.step.costs.batch import CostBatch
from schedc.step.costs.costs import Costs

_FSDP_PASSES = 1.5
"""Collectives of a microbatch with FSDP, two gathers and one scatter, over those of a step without it."""

Stages: TypeAlias = tuple[Floats, Floats, Floats]
"""[runs, K, stages] each: F, I and W of one microbatch."""


@dataclass(frozen=True, eq=False)
class StepSeconds:
    """[runs, K] seconds of the parts of a step, which add up to it.

    pipeline: from the first op to the last; for schedules without a wait between steps, that of the busiest rank.
    gradients: their sums, as far as no backward hides them. optimizer: its memory traffic. rest: what all steps have.
    """

    pipeline: Floats
    gradients: Floats
    optimizer: Floats
    rest: Floats

    @property
    def step(self) -> Floats:
        return self.pipeline + self.gradients + self.optimizer + self.rest


def step_times(runs: RunTable, constants: ConstantVectors) -> StepSeconds:
    """The times of all runs under all constants. Each order is made once, and simulated once for all that use it."""
    constants = constants.on(runs.once("devices", lambda: [run.cluster.device.name for run in runs.each]))
    parts = (
        dense_layer(runs, constants),
        moe_layer(runs, constants),
        embedding(runs, constants),
        head(runs, constants),
    )
    p2p = message(runs, constants)
    pipeline = np.zeros((len(runs), len(constants)))
    hidden, late = np.zeros((len(runs), len(constants))), _rows_beside_sums(runs, constants)
    for rows in runs.once("orders", lambda: _same_order(runs)):
        stages = _stage_times(runs, rows, parts, constants)
        pipeline[rows] = _simulated(runs, rows, stages, p2p[rows])
        hidden[rows] = (stages[1] + stages[2])[:, :, :: runs.each[rows[0]].pp].sum(axis=2)
    gradients = _gradients(runs, constants, pipeline, hidden, late)
    states = runs.once("states", lambda: _optimizer_bytes(runs))
    optimizer = (states / runs.hbm)[:, None] / constants["hbm"]
    return StepSeconds(pipeline, gradients, optimizer, np.broadcast_to(constants["step"], pipeline.shape))


def _same_order(runs: RunTable) -> list[Int64]:
    """Rows of runs that have one order; a schedule that is ordered by costs has one per run."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, run in enumerate(runs.each):
        own = row if run.limit else -1
        groups[run.schedule, run.pp, run.microbatches, run.vpp, own].append(row)
    return [np.array(rows) for rows in groups.values()]


def _stage_times(runs: RunTable, rows: Int64, parts: Sequence[PartTimes], constants: ConstantVectors) -> Stages:
    dense, moe, first, last = parts
    layers = runs.once(
        ("layers", int(rows[0])), lambda: np.array([runs.each[row].layers_of() for row in rows], np.float64)
    )
    layers = layers[:, None]
    split = np.where(runs.flag("split")[rows][:, :, None], constants["split"][:, :, None], 1.0)
    more = constants["chunk"][:, :, None]

    def stages(way: str, factor: Floats | float, chunk: Floats) -> Floats:
        of = [getattr(part, way)[rows][:, :, None] for part in (dense, moe, first, last)]
        time = of[0] * layers[..., 0] + of[1] * layers[..., 1]
        time[:, :, :1] += of[2]
        time[:, :, -1:] += of[3]
        return np.asarray(time * factor + chunk)

    return stages("forward", 1.0, more), stages("input", split, 0.5 * more), stages("weight", split, 0.5 * more)


def _simulated(runs: RunTable, rows: Int64, stages: Stages, p2p: Floats) -> Floats:
    """[rows, K] seconds of the pipeline."""
    run = runs.each[rows[0]]
    count, K, width = stages[0].shape
    F, I, W = (time.reshape(count * K, width) for time in stages)  # noqa: E741
    if run.limit:
        times = [tuple(time[0].tolist()) for time in (F, I, W)]
        costs = Costs(F=times[0], I=times[1], W=times[2], p2p=float(p2p[0, 0]))
        order = ordered_by(run.schedule, run.pp, run.microbatches, run.vpp, run.limit, costs)
    else:
        order = order_of(run.schedule, run.pp, run.microbatches, run.vpp)
    outcomes = simulate_batch(order, CostBatch(F, I, W, p2p=p2p.ravel()))
    time = outcomes.span.max(axis=0) if run.free_steps else outcomes.makespan
    return time.reshape(count, K)


def _rows_beside_sums(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds in which rows of the last backward of a rank take the network that sums of gradients need."""
    rail, node = exchange_lanes(runs, constants)
    far = (runs.replicas * runs.tp > runs.near)[:, None]
    return np.asarray(
        2.0 * np.where(far, rail, node) * runs.once("rank.layers", lambda: runs.column(_expert_layers))[:, None]
    )


def _expert_layers(run: TrainingRun) -> float:
    """Layers with experts of the first pipeline rank."""
    return float(np.asarray(run.layers_of())[:: run.pp, 1].sum())


def _gradients(runs: RunTable, constants: ConstantVectors, pipeline: Floats, hidden: Floats, late: Floats) -> Floats:
    """[runs, K] seconds of sums of gradients that nothing hides.

    hidden: [runs, K] seconds of the last backward of a rank, beside which the sums run where they overlap, but for the
    ``late`` ones of its rows. With FSDP each microbatch gathers parameters twice and scatters gradients once, beside
    its compute.
    """
    dense, experts = runs.once("gradient.bytes", lambda: _gradient_bytes(runs))
    copies = np.maximum(1.0, runs.replicas * runs.tp / runs.ep)
    time = gradient_sum(runs, constants, dense, runs.replicas, runs.tp) + gradient_sum(
        runs, constants, experts, copies, runs.ep
    )
    microbatches = runs.once("microbatches", lambda: runs.column(lambda run: run.microbatches))[:, None]
    sharded = microbatches * np.maximum(0.0, _FSDP_PASSES * time + 2.0 * late - pipeline / microbatches)
    beside = np.maximum(0.0, hidden - late)
    once = np.where(runs.flag("overlap"), np.maximum(0.0, time - beside), time)
    return np.where(runs.flag("fully_sharded"), sharded, once)


def _gradient_bytes(runs: RunTable) -> tuple[Floats, Floats]:
    """[runs] bytes of the fullest rank, without experts and of experts: a sum of gradients, and what follows it.

    ZeRO scatters sums of gradients and gathers weights of 2 bytes; without it the sums are gathered.
    """
    width = runs.column(lambda run: run.grad_bytes + (2 if run.zero else run.grad_bytes))
    return dense_parameters(runs) * width, expert_parameters(runs) * width


def _optimizer_bytes(runs: RunTable) -> Floats:
    shards = runs.column(lambda run: run.dp * run.cp if run.zero else 1)
    experts = np.maximum(1.0, shards * runs.tp / runs.ep)
    return OPTIMIZER_BYTES * (
        dense_parameters(runs) / shards + expert_parameters(runs) / np.where(shards > 1, experts, 1.0)
    )
