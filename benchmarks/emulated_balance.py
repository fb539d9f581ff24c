"""Emulates steps under each candidate of `balance auto`, and compares them with its choice: `balance.py auto`.

Eight processes over gloo: `1f1b` on two pipeline ranks, each an expert group of four in one node. Routing is drawn at a
stated skew (`drawn_routing`), anew in every microbatch. Segments and exchanges take emulated time, as `waterfall_steps`
says: experts by their rows, exchanges by rows or copies that a rank really sent or got, whichever is more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from drawn_routing import EXPERTS, RANKS, TOP, drawn
from waterfall_steps import (
    ENDLESS,
    INNER,
    PIPELINE,
    TOKENS,
    VOCAB,
    WIDTH,
    SplitsDevice,
    bound_executors,
    first_layers,
    model_of,
    token_loss,
)

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.recorded_rows import RecordedRows
from schedc.cell.rows import CellRows
from schedc.cell.table import CellTable
from schedc.compiler import Analysis, analyse
from schedc.ir.arrays import Int32
from schedc.load.library import Text
from schedc.planner.price.copies import LINES
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.gpt import counting_sequences
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.testing import pool

BLOCKS, MICROBATCHES = 4, 8
SKEWS = (1.0, 1.25, 1.6)
"""Rows of the fullest rank over the mean, as routing is drawn."""
NEAR = 1.01
"""The emulated step of the choice over the shortest one, at most."""
UNIT = 1e-3


def costs_of(dispatch: float) -> CellCosts:
    """Milliseconds of one layer at equally many rows. dispatch: of one exchange of rows."""
    segments = {
        "attention": SegmentTimes(20, 20, 18), "shared": SegmentTimes(6, 6, 0), "experts": SegmentTimes(20, 20, 26),
        "post": SegmentTimes(2, 2, 0), "dense": SegmentTimes(20, 20, 18),
    }  # fmt: skip
    return CellCosts.of(segments, {"routing.node": 1.0, "dispatch.node": dispatch, "combine.node": dispatch})


def plan_text(line: str) -> str:
    lines = [
        f"layers {1 + BLOCKS} dense 1",
        f"experts {EXPERTS} top {TOP} shared 1 width {INNER} hidden {WIDTH}",
        f"topology nodes 1 x {RANKS}",
        f"tokens {TOKENS} dtype fp32",
        "alltoall flat",
        "overlap auto",
        line,
    ]
    body = "\n".join(f"  {line}" for line in lines if line)
    return f"sched 1\n\nplan step = 1f1b(P = {PIPELINE}, M = {MICROBATCHES}) {{\n{body}\n}}\n"


def turns(step: int) -> range:
    """The microbatches of a step among those of all steps."""
    return range(step * MICROBATCHES, (step + 1) * MICROBATCHES)


def recorded(rho: float) -> Int32:
    """[2, layers, microbatches, ranks, experts] rows of both steps, as `Pipeline.record_routing` counts them."""
    return np.array([
        [[[np.bincount(mine.ravel(), minlength=EXPERTS) for mine in drawn(layer, turn, rho, TOKENS)]
          for turn in turns(step)] for layer in range(BLOCKS)] for step in range(2)
    ], np.int32)  # fmt: skip


def chosen(rho: float, dispatch: float) -> Analysis:
    """The analysis of a plan with `balance auto`, by the record of both steps."""
    rows = CellRows(recorded=RecordedRows.of_experts("drawn", recorded(rho)))
    costs = Costs(cell=CellTable(costs_of(dispatch), rows=rows))
    return analyse(Text(Source("step.sched", plan_text("balance auto")), "step"), {}, costs)


def rank_of_way(rank: int, world_size: int, way: str, dispatch: float, skews: Sequence[float]) -> list[float]:
    """Emulated seconds of a step on this process for each skew, behind a step that fixes copies for it."""
    costs = costs_of(dispatch)
    text = Text(Source("step.sched", plan_text(LINES[way])), "step")
    program = schedc.compile(text, costs=Costs(cell=CellTable(costs)))
    mesh = Mesh(PIPELINE, RANKS, per_node=RANKS)
    pipe = Pipeline(model_of(BLOCKS), program, loss_fn=token_loss, mesh=mesh, cells=costs, timeout=300)
    held = pipe.held(pipe.places[0])
    layers = {(stage.index, n): layer for stage in held for n, (_, layer) in enumerate(moe_layers(stage.module))}
    group = next(iter(layers.values())).routing.group
    row = dispatch * UNIT / (TOKENS * TOP * (RANKS - 1) / RANKS)
    clock = SplitsDevice(
        costs=costs, unit=UNIT, speeds={"dp": ENDLESS}, starts=SharedStarts.of_processes(mesh, rank), group=group,
        layers=layers, mean=TOKENS * TOP, rail_row=row, node_row=row, squares=(1.0,) * MICROBATCHES,
        slopes=(0.0,) * 3,
    )  # fmt: skip
    clock.listen()
    first = first_layers(held, program.stages, layers)
    replica, seconds, bound = mesh.coordinate(rank).replica, list[float](), False
    for rho in skews:
        for step in range(2):
            _prescribe(layers, first, rho, step, replica)
            if bound and step:
                dist.barrier()
                clock.begin()
            pipe.step(*counting_sequences(MICROBATCHES, TOKENS, replica, VOCAB))
            if not bound:
                bound = True
                for place, layer in layers.items():
                    if layer.lender is not None:
                        clock.carries(layer.lender, *place)
                for executor in bound_executors(pipe):
                    executor.code = clock.code(executor.code)
                clock.begin()
            elif step:
                seconds.append(clock.clock)
    pipe.close()
    return seconds


def _prescribe(
    layers: dict[tuple[int, int], MoELayer], first: Sequence[int], rho: float, step: int, replica: int
) -> None:
    """Let routers choose as drawn for a step."""
    for (stage, number), layer in layers.items():
        layer.router.choices = [  # type: ignore[assignment]
            torch.from_numpy(np.ascontiguousarray(drawn(first[stage] + number, turn, rho, TOKENS)[replica]))
            for turn in turns(step)
        ]
        layer.router.turn = 0  # type: ignore[assignment]


def auto(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the choice of `balance auto` in each case, beside emulated steps of all candidates."""
    ranks = pool(PIPELINE * RANKS)
    steps = {
        (way, dispatch): [max(each) for each in zip(*ranks.run(
            "emulated_balance:rank_of_way", timeout=600, way=way, dispatch=dispatch, skews=SKEWS,
        ), strict=True)]
        for dispatch in options.networks
        for way in LINES
    }  # fmt: skip
    cases = [_case(rho, dispatch, {way: steps[way, dispatch][n] for way in LINES})
             for dispatch in options.networks for n, rho in enumerate(SKEWS)]  # fmt: skip
    return {
        "cases": len(cases),
        "failed": sum(case["over_fastest"] > NEAR for case in cases),
        "over_fastest_max": max(case["over_fastest"] for case in cases),
        "error_max": max(case["error"] for case in cases),
        "figures": cases,
    }


def _case(rho: float, dispatch: float, emulated: dict[str, float]) -> dict[str, Any]:
    balanced = chosen(rho, dispatch).balanced
    assert balanced is not None
    predicted = {each.name: each.makespan * UNIT for each in balanced.candidates}
    return {
        "rho": rho,
        "dispatch_ms": dispatch,
        "chosen": balanced.chosen.name,
        "fastest": min(emulated, key=lambda way: emulated[way]),
        "over_fastest": emulated[balanced.chosen.name] / min(emulated.values()),
        "error": max(abs(predicted[way] / emulated[way] - 1) for way in LINES),
        **{f"{way} emulated_s": time for way, time in emulated.items()},
        **{f"{way} predicted_s": predicted[way] for way in LINES},
    }
