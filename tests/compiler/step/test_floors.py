"""Floors of a step under many costs: those of each alone, and below every program that the search finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schedc.cell import CellCosts, SegmentTimes, StageShape, stage_shape
from schedc.cell.cost_batch import CellCostBatch
from schedc.diagnostics import CompilerBug
from schedc.step.cells.cell_pricing import price
from schedc.step.cells.floors import floor_batch
from schedc.step.dependencies import Dependencies
from support.random_schedules import random_schedule, with_recomputation
from support.sweeps import thinned

BLOCKS = (["moe"], ["dense"], ["moe", "moe"], ["dense", "moe"], [])


def random_shapes(rng: np.random.Generator, stages: int, recompute: bool) -> list[StageShape]:
    """Graphs of stages, a few of them different; some recompute nodes in their backwards."""
    method = str(rng.choice(["flat", "hierarchical"]))
    kinds = [stage_shape(blocks, method, shared=bool(rng.random() < 0.5)) for blocks in BLOCKS]
    if recompute:
        kinds = [marked(kind, rng) for kind in kinds]
    return [kinds[rng.integers(0, len(kinds))] for _ in range(stages)]


def marked(shape: StageShape, rng: np.random.Generator) -> StageShape:
    chosen = rng.random(len(shape)) < 0.4
    nodes = [replace(node, recomputed=bool(yes), share=0.5) for node, yes in zip(shape.nodes, chosen, strict=True)]
    return StageShape(tuple(nodes), shape.outputs)


def random_costs(rng: np.random.Generator) -> CellCosts:
    """Costs of all roles; some times are 0."""

    def times() -> SegmentTimes:
        return SegmentTimes(*(rng.uniform(0, 5, 3) * (rng.random(3) < 0.8)).tolist())

    segments = {role: times() for role in ("attention", "permute", "experts", "shared", "post", "dense", "0.experts")}
    lanes = [f"{role}.{lane}" for role in ("routing", "dispatch", "combine") for lane in ("rail", "node")]
    return CellCosts.of(segments, {name: times()._replace(weight_gradient=0.0) for name in lanes})


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("seed", thinned(range(12), 3))
def test_floors_are_those_of_each_cost_and_below_every_program(seed: int) -> None:
    """On random orders, graphs and costs: floor <= inside <= atomic."""
    rng = np.random.default_rng(seed)
    schedule = random_schedule(seed)
    schedule = with_recomputation(schedule, seed) if seed % 3 == 0 else schedule
    cells, shapes = Dependencies.of(schedule), random_shapes(rng, schedule.stages, seed % 2 == 0)
    costs = [random_costs(rng) for _ in range(3)]
    p2p = rng.uniform(0, 1, 3)
    floors = floor_batch(cells, shapes, costs, p2p)
    for floor, cost, latency in zip(floors, costs, p2p.tolist(), strict=True):
        inside = price(cells, shapes, cost, latency)
        assert floor == inside.floor
        rounding = 1e-12 * inside.serial.makespan
        assert floor <= inside.late_wait.makespan + rounding
        assert inside.late_wait.makespan <= inside.serial.makespan + rounding


def test_a_floor_with_graphs_for_recomputations() -> None:
    rng = np.random.default_rng(0)
    cells = Dependencies.of(with_recomputation(random_schedule(3), 3))
    plain = [stage_shape(["moe"])] * cells.schedule.stages
    recomputed = [marked(shape, rng) for shape in plain]
    cost = random_costs(rng)
    floors = floor_batch(cells, plain, [cost], recomputed=recomputed)
    assert floors.tolist() == [price(cells, plain, cost, recomputed=recomputed).floor]


def test_costs_with_other_names_are_our_fault() -> None:
    one, other = CellCosts.of({"dense": SegmentTimes(1)}), CellCosts.of({"experts": SegmentTimes(1)})
    with pytest.raises(CompilerBug, match="different names"):
        CellCostBatch.of([one, other])
