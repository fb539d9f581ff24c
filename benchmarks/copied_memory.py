"""Counts rows and slots of copied experts on eight real processes, beside `schedc check --json`: `balance.py memory`.

`rows`: all tokens choose experts of the first rank, which is the worst that can be. `slots`: routing is drawn, and the
buffers of copies of a layer are counted behind its last step, on the rank that has most of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner
from even_steps import (
    EXPERTS,
    INNER,
    LAYERS,
    LENGTH,
    MICROBATCHES,
    NODES,
    PER_NODE,
    RANKS,
    SKEWS,
    TOP,
    WAYS,
    WIDTH,
    Draws,
    Prescribed,
    pipeline_of,
)

from runtime.moe.hot_cases import layers_of
from schedc.cell.recorded_rows import write_recording
from schedc.cli import main
from schedc.ir.arrays import Int64
from schedc_runtime.testing import pool
from support.copied_plans import CELLS

STEPS, TOKENS = 2, 512
KINDS = ("by step", "by microbatch")
"""The ways whose rows and slots are counted."""


class OnFirstRank(Prescribed):
    """All tokens choose the first experts, which the first rank has."""

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.arange(TOP).expand(self.draws.tokens, TOP).contiguous()


def rank_of_memory(rank: int, world_size: int, way: str, draws: Sequence[Any], worst: bool) -> list[dict[str, int]]:
    """[layers] the most rows of a microbatch, and bytes of slots, of the last of ``STEPS`` steps on this process.

    worst: rows are those of all steps, since the first step has no copies by step.
    """
    drawn = Draws(*draws)
    pipe = pipeline_of(way, drawn.tokens)
    layers = layers_of(pipe)
    rows: list[list[int]] = [[] for _ in layers]
    for number, (layer, counted) in enumerate(zip(layers, rows, strict=True)):
        layer.experts.register_forward_pre_hook(lambda _, given, counted=counted: counted.append(len(given[0])))
        layer.router._chosen = (OnFirstRank if worst else Prescribed)(drawn, number, rank)
    batch = torch.zeros(MICROBATCHES * drawn.tokens // LENGTH, LENGTH, dtype=torch.int64)
    for _ in range(STEPS):
        for counted in rows if not worst else ():
            counted.clear()
        pipe.step(batch, batch)
        pipe.zero_grad()
    slots = [0 if layer.lender is None else layer.lender._slots.nbytes for layer in layers]
    pipe.close()
    return [{"rows": max(counted), "slots": held} for counted, held in zip(rows, slots, strict=True)]


def checked(way: str, rows: Int64) -> dict[str, Any]:
    """What `schedc check --json` says of the balance of a plan. rows: [steps, layers, microbatches, ranks, experts]."""
    lines = [
        f"layers {LAYERS + 1} dense 1",
        f"experts {EXPERTS} top {TOP} width {INNER} hidden {WIDTH}",
        f"topology nodes {NODES} x {PER_NODE}",
        f"tokens {TOKENS} dtype fp32",
        "alltoall flat",
        WAYS[way].strip(),
    ]
    body = "\n".join(f"  {line}" for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        plan, costs, record = (Path(folder) / name for name in ("a.sched", "costs.toml", "routing.npz"))
        plan.write_text(f"sched 1\n\nplan a = 1f1b(P = 1, M = {MICROBATCHES}) {{\n{body}\n}}\n")
        costs.write_text(CELLS.replace("node", "rail"))
        write_recording(record, rows)
        asked = ["check", str(plan), "--cost-file", str(costs), "--record", str(record), "--json"]
        facts: dict[str, Any] = json.loads(CliRunner().invoke(main, asked).output)["plan"]["balance"]
    return facts


def recorded(draws: Draws) -> Int64:
    """[steps, layers, microbatches, ranks, experts] rows of all steps, by the rank of the tokens."""
    return np.array([
        [[[np.bincount(draws.choices(layer, step * MICROBATCHES + turn, rank).ravel(), minlength=EXPERTS)
           for rank in range(RANKS)] for turn in range(MICROBATCHES)] for layer in range(LAYERS)]
        for step in range(STEPS)
    ])  # fmt: skip


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of counted and of predicted rows and bytes."""
    cases, processes = [], pool(RANKS)
    for way in KINDS:
        for name, exponent in {**SKEWS, "worst": None}.items():
            draws = Draws(exponent or 0.0, TOKENS, options.seed)
            ranks = processes.run(
                "copied_memory:rank_of_memory", timeout=300, way=way, draws=list(draws), worst=exponent is None
            )
            facts = checked(way, recorded(draws))
            if exponent is None:
                counted, predicted = max(layer["rows"] for rank in ranks for layer in rank), facts["worst_rows"]
                cases.append({"case": f"{way}, worst rows", "counted": counted, "predicted": predicted})
            elif way == "by step":
                for layer in range(LAYERS):
                    counted, predicted = max(rank[layer]["slots"] for rank in ranks), facts["rows"]["slots"][layer]
                    case = f"{way}, {name}, slots of layer {layer}"
                    cases.append({"case": case, "counted": counted, "predicted": predicted})
            else:
                counted, predicted = max(layer["rows"] for rank in ranks for layer in rank), facts["rows"]["rows"]
                cases.append({"case": f"{way}, {name}, most rows", "counted": counted, "predicted": predicted})
    failed = sum(case["counted"] != case["predicted"] for case in cases)
    return {"cases": len(cases), "failed": failed, "figures": cases}
