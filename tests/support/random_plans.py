"""Random models, clusters and plans: small, of odd sizes, with constants of any fit."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.cluster.values import Accelerator, Cluster, NetworkLevel
from schedc.planner.model.check import contradictory_sizes
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.presets.tables import files
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.search.bound import PlanBounds
from schedc.planner.space.blocks import PlanBlock
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.problem import PlanProblem
from schedc.planner.times.skew import LOADS

_LARGEST = 400
"""Forwards of an order, so that one price takes a fraction of a second."""


@dataclass(frozen=True, eq=False)
class DrawnPlan:
    """A plan of a random space with its bounds: seconds of a step, bytes of the fullest rank, whether it may fit."""

    planned: PlannedStep
    step: float
    memory: float
    fits: bool


def random_plan(rng: random.Random) -> DrawnPlan | None:
    """A plan of a random prefix of a random space, bounded; None where it has none that is small."""
    if (drawn := random_planned(rng)) is None:
        return None
    space, block, number, planned = drawn
    bounded = PlanBounds(space, planned.problem, planned.table).of(block)
    place = np.unravel_index(number, block.legal.shape)
    memory = bounded.memory[(*place[:4], place[5])]
    return DrawnPlan(planned, float(bounded.step[place]), float(memory), bool(bounded.fits[place]))


def random_planned(rng: random.Random, largest: int = _LARGEST) -> tuple[PlanSpace, PlanBlock, int, PlannedStep] | None:
    """A space, a block of it, and a plan of the block with its number; None where none is small.

    largest: forwards of the order.
    """
    model = random_model(rng) if rng.random() < 0.8 else open_model(rng.choice([*files("models")]))
    cluster = _random_cluster(rng) if rng.random() < 0.8 else _shipped_cluster(rng)
    batch, seq = rng.choice([1, 2, 6, 16, 48, 64, 96]), rng.choice([96, 100, 1000, 2048, 4096, 8192])
    space = PlanSpace.of(model, cluster, batch, seq, rng.choice(["standard", "wide"]))
    prefixes = [each for each in space.prefixes() if each.pp * each.vpp * each.microbatches <= largest]
    if not prefixes:
        return None
    block = space.block([rng.choice(prefixes)])
    if not len(block):
        return None
    number = int(rng.choice(block.numbers().tolist()))
    axes, prefix = block.axes(number), block.prefixes[0]
    constants, skew = _random_constants(rng), rng.choice([1.0, 0.0, 1.3, 3.0])
    loads = {"skew": skew} if skew else {"spread": LOADS, "assumed": True}
    problem = PlanProblem(space.model, cluster, batch, constants, **loads)
    splits = [prefix.split_by(method, overlap) for method in block.inner.methods for overlap in space.values.overlaps]
    table = PartTable.of(problem, splits)
    return space, block, number, PlannedStep(problem, axes, space.choice(axes.schedule), table)


def random_model(rng: random.Random) -> ModelSizes:
    """A model of up to 24 layers whose sizes do not contradict each other."""
    while True:
        model = _any_model(rng)
        if not next(iter(contradictory_sizes(model)), None):
            return model


def _any_model(rng: random.Random) -> ModelSizes:
    layers = rng.choice([1, 2, 3, 4, 6, 7, 8, 12, 24])
    model = ModelSizes(
        "random",
        layers,
        hidden=rng.choice([64, 96, 768, 2048, 7168]),
        vocab=rng.choice([100, 32_000, 151_936]),
        attention=_attention(rng, layers),
        ffn=rng.choice([0, 256, 3072, 18_432]),
        gated=rng.random() < 0.7,
        moe=_moe(rng, layers) if rng.random() < 0.6 else None,
        mtp=rng.choice([0, 0, 0, 1, 2]),
        tied=rng.random() < 0.3,
        norms=rng.choice([2, 2, 4]),
        positions=rng.choice([0, 0, 8192]),
    )
    biases = rng.random() < 0.3
    return replace(model, norm_bias=biases, mlp_bias=biases)


def _attention(rng: random.Random, layers: int) -> AttentionSizes:
    heads = rng.choice([1, 2, 3, 8, 12, 16, 25, 32])
    width = rng.choice([16, 64, 80, 128])
    windowed = tuple(range(0, layers, 2)) if rng.random() < 0.2 else ()
    sizes = AttentionSizes(heads, heads, width, width, window=128 if windowed else 0, windowed=windowed)
    if rng.random() < 0.3:
        narrow = rng.choice([0, 192, 1536])
        return replace(sizes, kind=AttentionKind.MLA, q_lora=narrow, kv_lora=rng.choice([64, 512]), rope_dim=64)
    odd = {name: rng.random() < 0.3 for name in ("qkv_bias", "out_bias", "head_norms", "sinks")}
    return replace(sizes, kv_heads=rng.choice([kv for kv in range(1, heads + 1) if heads % kv == 0]), **odd)


def _moe(rng: random.Random, layers: int) -> MoeSizes:
    experts = rng.choice([1, 2, 5, 8, 12, 64, 256])
    top = rng.randint(1, min(8, experts))
    return MoeSizes(
        experts,
        top,
        width=rng.choice([64, 768, 2048]),
        shared=rng.choice([0, 0, 1, 2]),
        first_dense=rng.randrange(min(4, layers)),
        bias=rng.random() < 0.2,
    )


def _shipped_cluster(rng: random.Random) -> Cluster:
    return open_cluster(rng.choice([*files("clusters")]), 8 * rng.choice([1, 2, 4, 8, 12]))


def _random_cluster(rng: random.Random) -> Cluster:
    """Nodes of any size, with one to three levels of network."""
    per_node, nodes = rng.choice([1, 2, 3, 4, 6, 8, 16]), rng.choice([1, 1, 2, 3, 5, 8])
    devices = per_node * nodes
    sizes = {per_node, devices, *([2] if per_node % 2 == 0 and rng.random() < 0.2 else [])} - {1} or {1}
    levels = tuple(
        NetworkLevel(
            f"level{size}",
            size,
            alpha_s=rng.choice([0.0, 1e-6, 1e-4]),
            Bps=10 ** rng.uniform(8, 12),
            nics=rng.choice([0, 1, per_node]) if size > per_node else 0,
            oversubscription=rng.choice([1.0, 1.0, 4.0]),
        )
        for size in sorted(sizes)
    )
    device = Accelerator("random", {"bf16": 10 ** rng.uniform(13, 16)}, 100, int(10 ** rng.uniform(9.5, 12)), 1e12, 0.9)
    return Cluster("random", devices, per_node, device, levels)


def _random_constants(rng: random.Random) -> dict[str, float]:
    """A few constants away from their medians, as far as fits find them."""
    own = random.Random(rng.random())  # whatever the number of constants, other draws stay as they are
    moved = own.sample(CONSTANTS, own.choice([0, 3, len(CONSTANTS)]))
    return {each.name: min(each.most, each.median * own.lognormvariate(0, each.width)) for each in moved}
