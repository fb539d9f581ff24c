"""Times steps with copies of experts in emulated device time, for `benchmarks/balance.py time`.

The processes, the routing and the times are those of `hot_experts.py`. What a rank computes and what an exchange moves
follow from the routes of the runtime. A copy takes the link as long as its bytes, of the busiest rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch.distributed as dist
from drawn_traffic import INNER, MEAN, PER_ROW, RANKS, Traffic, copied_rows
from hot_experts import COSTS, POLICIES, SKEWS, WARM, Variant

import schedc
from schedc.cell.costs import CellCosts
from schedc.cell.table import CellTable
from schedc.ir.arrays import Floats
from schedc.ir.program import computation
from schedc.step.cells.cell_pricing import price
from schedc.step.cells.group_pricing import RankRows
from schedc.step.dependencies import Dependencies
from schedc_runtime.moe.even_rows import EvenRows
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.ranks.mesh import Mesh, peer_groups
from schedc_runtime.testing import pool
from schedc_runtime.transport.distributed import TorchTransport

WAYS = {
    "none": POLICIES["0"], "hot auto": POLICIES["auto"], "by step": EvenRows(by_step=True), "by microbatch": EvenRows(),
}  # fmt: skip
MICROBATCHES, REPETITIONS, UNIT = 4, 3, 2e-3
NEAR = 0.03
"""By how much a step by step may be longer than one of equally popular experts, and a step than its prediction."""


def with_copies(rows: float) -> CellCosts:
    """The costs where copies take the link as long as so many rows, there and back."""
    return CellCosts.of(dict(COSTS.segments), {**dict(COSTS.exchanges), "hot.node": rows * PER_ROW})


class RoutedVariant(Variant):
    """A way with copies that make rows even, whose emulated device follows the routes that the layers make."""

    def _prescribe(self, layer: MoELayer, place: tuple[int, int], rank: int, options: dict[str, Any]) -> None:
        super()._prescribe(layer, place, rank, options)
        forwards = count()

        def note(_: Any, given: Any, route: Any) -> None:
            key = (*place, next(forwards) % self.microbatches)
            self.device.traffic[key] = Traffic.between(route.counts.rows.long().numpy())
            if route.copies is not None:
                self.device.copies[key] = copied_rows(route.copies)

        layer.planner.register_forward_hook(note)


class CopyingVariant(RoutedVariant):
    """A way with copies by microbatch, for which cells leave time."""

    costs = with_copies(2 * 3.0 * INNER)


VARIANTS = {"by step": RoutedVariant, "by microbatch": CopyingVariant}


def rank_of_times(rank: int, world_size: int, exponent: float) -> dict[str, list[dict[str, Any]]]:
    """By way and measured step: seconds on this process, rows of ranks over the mean, and rows of copies.

    The last two are by stage and microbatch.
    """
    options = {
        "exponent": exponent, "microbatches": MICROBATCHES, "layers": 1, "unit": UNIT, "repetitions": REPETITIONS
    }  # fmt: skip
    near = peer_groups(Mesh(1, RANKS), Mesh(1, RANKS).coordinate(rank), 60.0)
    transport = TorchTransport(dist.new_group([rank], use_local_synchronization=True), 60.0)
    variants = {name: VARIANTS.get(name, Variant)(policy, near, transport, options) for name, policy in WAYS.items()}
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(WARM + REPETITIONS):
        for name, variant in variants.items():
            time, _, _ = variant.step()
            traffic, copies = variant.device.traffic, variant.device.copies
            rows = [(each.own + each.borrowed).tolist() for _, each in sorted(traffic.items())]
            figures[name].append(
                {"time": time, "rows": rows, "copies": [copies.get(key, 0) for key in sorted(traffic)]}
            )
    return {name: each[WARM:] for name, each in figures.items()}


def predicted(rows: Floats, copies: Floats) -> float:
    """Seconds of a step in which ranks compute ``rows`` [stages, microbatches, ranks] over the mean.

    copies: [stages, microbatches] rows with the bytes of the busiest rank's copies. Copies of a step are not priced.
    """
    program = schedc.compile("dualpipev", P=1, M=MICROBATCHES)
    costs, busiest = COSTS, None
    if copies.any():
        costs, busiest = with_copies(float(copies.mean())), np.repeat(copies[:, :, None], RANKS, 2)
    shapes = CellTable(costs, (("moe",),)).shapes(program.stages)
    group = RankRows(rows, shapes, copies=busiest)
    step = price(Dependencies.of(computation(program)[0]), shapes, costs, group=group)
    return float(step.late_wait.makespan) * UNIT


def of_way(ranks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """ms: of the shortest step on its slowest rank. error: of its prediction, over it."""
    steps = list(zip(*ranks, strict=True))
    shortest = min(steps, key=lambda step: max(rank["time"] for rank in step))
    seconds = max(rank["time"] for rank in shortest)
    rows = np.array(shortest[0]["rows"]).reshape(-1, MICROBATCHES, RANKS) / MEAN
    copies = np.array(shortest[0]["copies"]).reshape(-1, MICROBATCHES)
    return {
        "ms": 1e3 * seconds,
        "fullest": float(rows.max(2).mean()),
        "error": predicted(rows, copies) / seconds - 1,
    }


def times(options: argparse.Namespace) -> dict[str, Any]:
    """Steps by routing and way, and how many are longer than they may be."""
    figures: dict[str, Any] = {}
    for name, exponent in SKEWS.items():
        answers = pool(RANKS).run("even_times:rank_of_times", timeout=900, exponent=exponent)
        figures[name] = {way: of_way([rank[way] for rank in answers]) for way in WAYS}
    failed = []
    balanced = figures["balanced"]["none"]["ms"]
    for name, ways in figures.items():
        ms = {way: each["ms"] for way, each in ways.items()}
        failed += [f"{name}: by step is slower than {way}" for way in ("none", "hot auto") if ms["by step"] > ms[way]]
        failed += [f"{name}, {way}: predicted" for way, each in ways.items() if abs(each["error"]) > NEAR]
    if figures["zipf_1.0"]["by step"]["ms"] > (1 + NEAR) * balanced:
        failed.append("zipf_1.0: by step is slower than balanced routing")
    return {"cases": len(SKEWS) * len(WAYS), "failed": len(failed), "which": failed, **figures}
