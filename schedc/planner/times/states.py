"""Parameters of the ranks of many runs: what gradients and the optimizer move, and what memory holds."""

from __future__ import annotations

from schedc.ir.arrays import Floats
from schedc.model.counts import layer_parameters, model_parameters, without_experts
from schedc.model.parts import PartName
from schedc.planner.times.run import TrainingRun
from schedc.planner.times.table import RunTable

OPTIMIZER_BYTES = 28.0
"""Bytes per parameter that Adam reads and writes: gradient, master weight and two moments of 4, weight of 2."""


def dense_parameters(runs: RunTable) -> Floats:
    """[runs] parameters of the fullest rank without its experts: those that all replicas share."""
    return runs.column(lambda run: max(dense for dense, _ in rank_parameters(run)))


def expert_parameters(runs: RunTable) -> Floats:
    """[runs] parameters of the experts of the fullest rank."""
    return runs.column(lambda run: max(experts for _, experts in rank_parameters(run)))


def rank_parameters(run: TrainingRun) -> list[tuple[float, float]]:
    """[pp] parameters of each rank of a pipeline, without experts, and of its experts. Stage s is on rank s mod pp.

    A head that uses the embedding has a copy of it where it is on another rank.
    """
    outside = model_parameters(run.model).outside
    word = outside[PartName.EMBEDDING]
    result = []
    for rank in range(run.pp):
        stages = run.layer_ranges()[rank :: run.pp]
        layers = [without_experts(layer_parameters(run.model, layer)) for stage in stages for layer in stage]
        dense, experts = (sum(each[part] for each in layers) for part in (0, 1))
        if rank == 0:
            dense += word
        if rank == run.pp - 1:
            dense += outside.get(PartName.HEAD, word if run.pp > 1 else 0)
        result.append((dense / run.tp, experts / run.ep))
    return result
