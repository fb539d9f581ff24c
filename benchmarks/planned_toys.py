"""Toys for `planned`: models, machines and batches drawn by a seed, each planned for a process per device."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from schedc.model.sizes import AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.library import open_cluster
from schedc.planner.price.priced import PricedPlan
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem

_PROCESSES = 8
"""Devices of a toy: each is a process of this machine."""
_RUN = ("pp >= 2", "tp == 1", "cp == 1", "zero <= 1", "microbatch <= 2")
"""What all plans of toys have: pipelines, experts and replicas on ranks of a runtime that splits no matrix."""

_ALIKE = 8
"""Plans that are searched for each that runs: many differ in what no pipeline shows."""


@dataclass(frozen=True)
class DrawnToy:
    """A model, a machine, a batch, and the conditions of its plans. name: of the seed and its number."""

    name: str
    model: ModelSizes
    cluster: Cluster
    sequences: int
    required: tuple[str, ...]


def toys(seed: int, count: int) -> list[DrawnToy]:
    """The toys of a seed: 8 to 16 layers, 8 to 16 experts, 4 or 8 devices in one node or two."""
    rng = random.Random(seed)
    return [_toy(rng, f"{seed}.{number}") for number in range(count)]


def plans_of(toy: DrawnToy, top: int) -> list[PricedPlan]:
    """The best plans of a toy at the priors, with files: one plan for each time of a pipeline."""
    conditions = [read_condition(text) for text in (*_RUN, *toy.required)]
    space = PlanSpace.of(toy.model, toy.cluster, toy.sequences, toy.model.seq, "standard", conditions)
    options = SearchOptions(top=_ALIKE * top)
    found = search(space, PlanProblem(toy.model, toy.cluster, toy.sequences), options).plans
    by_makespan = {f"{plan.priced.makespan:.9e}": plan.priced for plan in reversed(found) if plan.priced is not None}
    return sorted(by_makespan.values(), key=lambda plan: plan.step)[:top]


def _toy(rng: random.Random, name: str) -> DrawnToy:
    experts, heads = rng.choice([8, 12, 16]), rng.choice([4, 8, 16])
    width = rng.choice([16, 64, 128])
    moe = MoeSizes(
        experts,
        rng.choice([1, 2, 4]),
        width=rng.choice([64, 256, 1024]),
        shared=rng.choice([0, 1]),
        first_dense=rng.choice([0, 1, 2]),
    )
    model = ModelSizes(
        f"toy {name}", rng.randint(8, 16), hidden=heads * width, vocab=rng.choice([1000, 32_000]),
        attention=AttentionSizes(heads, heads, width, width), ffn=4 * heads * width, moe=moe,
        seq=rng.choice([64, 512, 4096]), mtp=rng.choice([0, 0, 1]),
    )  # fmt: skip
    devices = rng.choice([4, _PROCESSES])
    required = rng.choice([(), ("ep >= 2",), ("ep >= 2", "overlap")])
    return DrawnToy(name, model, _machine(rng, devices), rng.choice([16, 32, 48]), required)


def _machine(rng: random.Random, devices: int) -> Cluster:
    """A preset whose nodes have all devices, or half of them, with its networks or slower ones."""
    preset = open_cluster(rng.choice(["h100", "a100-80", "b200", "mi300x"]))
    node = rng.choice([devices, devices // 2])
    inner, outer = preset.levels
    slower = rng.choice([1.0, 10.0, 50.0])
    levels = (
        replace(inner, size=node, Bps=inner.Bps / slower),
        replace(outer, size=devices, Bps=outer.Bps / slower, nics=min(outer.nics, node)),
    )
    return replace(preset, devices=devices, per_node=node, levels=levels, fit="", source=None)
