"""No exact price is below the bound: over random models, clusters and plans."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from schedc.planner.presets.library import cluster_names, model_names, open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable, RankSplit
from schedc.planner.price.priced import price_plan
from schedc.planner.price.problem import PlanProblem
from schedc.planner.search.bound import PlanBounds, splits_of
from schedc.planner.space.blocks import PlanBlock
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace

PLANS = 10_000 if os.environ.get("SCHEDC_SWEEP") == "full" else 24
_LARGEST = 1_500
"""Forwards of an order, so that one price takes a fraction of a second."""


def random_block(rng: random.Random) -> tuple[PlanSpace, PlanBlock] | None:
    """The plans of a random prefix of a random space; None where it has none that is small."""
    model = open_model(rng.choice(model_names()))
    cluster = open_cluster(rng.choice(cluster_names()), 8 * rng.choice([1, 2, 4, 8, 12]))
    batch, seq = rng.choice([16, 48, 64, 96]), rng.choice([2048, 4096, 8192])
    space = PlanSpace.of(model, cluster, batch, seq, "wide")
    prefixes = [each for each in space.prefixes() if each.pp * each.vpp * each.microbatches <= _LARGEST]
    if not prefixes:
        return None
    block = space.block([rng.choice(prefixes)])
    return (space, block) if len(block) else None


def check_one(rng: random.Random) -> bool:
    """Whether there was a plan: its bound, its price."""
    drawn = random_block(rng)
    if drawn is None:
        return False
    space, block = drawn
    problem = PlanProblem(space.model, space.cluster, space.batch)
    prefix = block.prefixes[0]
    splits = [RankSplit(prefix.tp, prefix.cp, prefix.ep, prefix.microbatch, method) for method in block.inner.methods]
    table = PartTable.of(problem, splits)
    bounded = PlanBounds(space, problem, table).of(block)
    number = int(rng.choice(block.numbers().tolist()))
    axes = block.axes(number)
    place = np.unravel_index(number, block.legal.shape)
    priced = price_plan(PlannedStep(problem, axes, space.choice(axes.schedule), table))
    assert bounded.step[place] <= priced.step * (1 + 1e-9), axes
    held = max(priced.peaks) + priced.reserve
    assert bounded.memory[(*place[:4], place[5])] <= held * (1 + 1e-9), axes
    assert bounded.fits[place] or not priced.fits, axes
    return True


@pytest.mark.slow
def test_no_price_is_below_its_bound() -> None:
    rng = random.Random(20)
    assert sum(check_one(rng) for _ in range(PLANS)) > 0.8 * PLANS


@pytest.mark.parametrize("kind", ["standard", "wide"])
def test_all_plans_are_bounded(kind: str) -> None:
    conditions = [read_condition("pp in 2, 4"), read_condition("microbatch == 1")]
    space = PlanSpace.of(open_model("qwen3-30b-a3b"), open_cluster("h100", 64), 256, 4096, kind, conditions)
    problem = PlanProblem(space.model, space.cluster, space.batch)
    bounds = PlanBounds(space, problem, PartTable.of(problem, splits_of(space)))
    blocks = list(bounds.blocks())
    assert sum(len(bounded.block) for bounded in blocks) == sum(map(len, space.blocks())) > 10_000
    assert all(np.isfinite(bounded.step).all() and (bounded.step > 0).all() for bounded in blocks)
    assert all((bounded.memory > 0).all() for bounded in blocks)
