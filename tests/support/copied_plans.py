"""A plan with copies of experts on four ranks, its costs, and routing that is drawn for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from schedc.cell.recorded_rows import write_recording
from schedc.compiler import Analysis, analyse
from schedc.ir.arrays import Int64
from schedc.source import Source
from schedc.step.costs.costs import parse_costs

LINES = """  layers 4
  experts 8 top 2 width 16 hidden 32
  topology nodes 1 x 4 node 400 GB/s
  tokens 64 dtype bf16
  alltoall flat
"""
CELLS = """schema = "schedc.costs/1"
[cell]
attention = {F = 20, I = 20, W = 20}
experts = {F = 20, I = 20, W = 20}
dispatch = {node = 6}
combine = {node = 6}
"""
LAYERS, MICROBATCHES, RANKS, EXPERTS = 4, 5, 4, 8


def routed(seed: int = 0, skew: float = 1.0) -> Int64:
    """[1, layers, microbatches, ranks, experts] rows of tokens with two choices each."""
    generator = np.random.default_rng(seed)
    share = np.arange(1, EXPERTS + 1) ** -skew
    drawn = [
        generator.multinomial(128, generator.permutation(share / share.sum()), (MICROBATCHES, RANKS))
        for _ in range(LAYERS)
    ]
    return np.array(drawn)[None]


def analysed(
    folder: Path, rows: Int64 | None, line: str = "", schedule: str = "zbh1", cells: str = CELLS, lines: str = LINES
) -> Analysis:
    (folder / "a.sched").write_text(
        f"sched 1\n\nplan a = {schedule}(P = 2, M = {MICROBATCHES}) {{\n{lines}{line}\n}}\n"
    )
    if rows is not None:
        write_recording(folder / "r.npz", rows)
        cells += '[cell.rows]\nrecorded = "r.npz"\n'
    return analyse(folder / "a.sched", {}, parse_costs(Source(str(folder / "costs.toml"), cells)))
