"""Draws what prices are compared on: models, clusters, plans, precisions and software, by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.values import Cluster
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.search.bound import PlanBounds
from schedc.planner.space.blocks import PlanBlock
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import Stack
from support.random_plans import random_planned

_LARGEST = 64
"""Forwards of an order: a price takes milliseconds."""
_ROOM = 2**50
"""Bytes of a device: more than any plan needs, so that searches leave none out."""
_START = 1e-9
"""Seconds of a start at least: cluster files have no 0."""


class PlanDraw(NamedTuple):
    """A drawn plan, with the space that has it, the block of the space, and its number in the block."""

    planned: PlannedStep
    space: PlanSpace
    block: PlanBlock
    number: int


def plan_draws(rng: random.Random, largest: int = _LARGEST) -> Iterator[PlanDraw]:
    """Plans without end. Half of those are skipped that have nothing rare: pairs, ZeRO above 1, recomputation."""
    while True:
        if (drawn := random_planned(rng, largest)) is None:
            continue
        space, block, number, planned = drawn
        axes = planned.axes
        if axes.overlap or axes.zero > 1 or axes.recompute != "none" or rng.random() < 0.5:
            cluster, model = _roomy(rng, space.cluster), _unaligned(rng, space.model)
            space = replace(space, model=model, cluster=cluster, _orders={})
            precision = rng.choice([*cluster.device.peak])
            stack = _stack(rng, axes.schedule)
            problem = replace(planned.problem, model=model, cluster=cluster, precision=precision, stack=stack)
            planned = replace(planned, problem=problem, table=PartTable.of(problem, planned.table.splits))
            yield PlanDraw(planned, space, block, number)


def bound_of(draw: PlanDraw) -> float:
    """Seconds of a step below which a search says the plan is not."""
    bounded = PlanBounds(draw.space, draw.planned.problem, draw.planned.table).of(draw.block)
    return float(bounded.step.flat[draw.number])


def _unaligned(rng: random.Random, model: ModelSizes) -> ModelSizes:
    """The model, now and then with heads of a width that 8 does not divide."""
    attention = model.attention
    if rng.random() < 0.9:
        return model
    return replace(model, attention=replace(attention, qk_dim=attention.qk_dim + 4, v_dim=attention.v_dim + 4))


def _roomy(rng: random.Random, cluster: Cluster) -> Cluster:
    """The cluster with memory for any plan, starts that files can say, a peak of 8 bits, and rails here and there."""
    own = random.Random(f"{cluster.devices} {cluster.levels[0].Bps}")  # other draws stay as they are
    rails = [number > 0 and own.random() < 0.5 for number in range(len(cluster.levels))]
    levels = tuple(
        replace(level, alpha_s=max(level.alpha_s, _START), rails=on_rails)
        for level, on_rails in zip(cluster.levels, rails, strict=True)
    )
    peak = cluster.device.peak
    if "fp8" not in peak and rng.random() < 0.5:
        peak = {**peak, "fp8": 2.0 * peak["bf16"]}
    device = replace(cluster.device, hbm_bytes=_ROOM, peak=peak)
    return replace(cluster, device=device, levels=levels, fit="", source=None)


def _stack(rng: random.Random, schedule: str) -> Stack:
    """Software with a few traits that differ from those of a search; half of the time none."""
    if rng.random() < 0.5:
        return Stack()
    flags = ("fused", "sequence_parallel", "overlap", "graphs", "attention_graphs", "dropout", "block_scales",
             "chunked_tp", "recomputes_scores")  # fmt: skip
    own = Stack()
    turned = {name: not getattr(own, name) for name in flags if rng.random() < 0.25}
    free = schedule.startswith("zb") and rng.random() < 0.5
    return replace(own, **turned, grad_bytes=rng.choice([2, 4]), free_steps=free)
