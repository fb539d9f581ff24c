"""Flags for Megatron, judged by megatron-core: the configuration takes the flags, and the tables give the same order.

`make trainers` installs it; without it the flags are still tested by their text, in `test_megatron.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.compiler import price
from schedc.inputs import open_input
from schedc.interchange.megatron_plan import RELEASE
from schedc.ir.ops import OpKind
from schedc.plan.layout.parser import parse_layout
from schedc.plan.layout.parts import PartKind
from support.needs import TRAINERS, needs
from support.paths import ROOT
from support.plan_cases import written

SIZES = """experts 16 top 2 groups 4 limit 2 {shared} width 16 hidden 64
  block heads 8 head 16 inner 96 {attention} sequence 128
  topology nodes 2 x 8  tokens 64 dtype bf16  alltoall {method}
  parallel tp 2 of attention cp 1 ep 16 dp 8 zero 1  batch 64 x 128 by 1"""
LATENT = "query 24 latent 16 rotary 8"
PAIRS, LOOP, PLAIN = (
    "interleaved_overlap(P = 4, M = 8, v = 2)",
    "interleaved_1f1b(P = 4, M = 8, v = 2)",
    "1f1b(P = 4, M = 8)",
)
EIGHT, FOUR = 'layout "Et|tt|t|t|t|tt|m|L" dense 1', 'layout "Et|tt|t|tmL" dense 0'


def sized(layout: str, method: str = "flat", shared: str = "shared 1", attention: str = LATENT) -> str:
    return f"{layout}\n  {SIZES.format(method=method, shared=shared, attention=attention)}"


PLANS = {
    "pairs": (sized(EIGHT, "hierarchical") + "  overlap auto", PAIRS),
    "pairs, act": (
        sized('layout "Et|tt|t|t|t|tt|t|L" dense 0', shared="", attention="keys 4") + "  overlap auto  recompute act",
        PAIRS,
    ),
    "gathered, norm": (sized(EIGHT, "allgather") + "  recompute norm", LOOP),
    "full": (sized(EIGHT) + "  recompute full", LOOP),
    "layer": (sized(FOUR, "hierarchical") + "  recompute layer", PLAIN),
    "dense": (
        "layers 8\n  block hidden 64 heads 8 head 16 keys 2 inner 96 matrices 2 sequence 128\n"
        "  tokens 32 dtype bf16  parallel tp 2 cp 2 dp 4 zero 1  batch 32 x 128 by 1  recompute full",
        LOOP,
    ),
    "one rank": (
        sized('layout "EttttL" dense 1').replace("by 1", "by 2").replace("tokens 64", "tokens 128") + "  overlap auto",
        "1f1b_overlap(P = 1, M = 4)",
    ),
}


def case(name: str, folder: Path) -> dict[str, Any]:
    """The flags of a plan as words, and what Megatron must make of them."""
    (folder / name).mkdir()
    path = written(folder / name, *PLANS[name])
    result = CliRunner().invoke(main, ["export", path, "--to", "megatron"])
    assert result.exit_code == 0, result.output
    schedule = price(open_input(Path(path)), {}).schedule
    layout = parse_layout(schedule.layout)
    kinds = list(PartKind)
    counts = [
        [int(row[kinds.index(PartKind.DENSE)]), int(row[kinds.index(PartKind.MTP)])] for row in layout.counts.tolist()
    ]
    order = []
    for rank in range(schedule.ranks if schedule.ranks > 1 else 0):
        ops = list(schedule.ops(rank))
        runs = [[op.stage, op.microbatch] for op in ops if op.kind is OpKind.F]
        ahead = next(place for place, op in enumerate(ops) if op.kind is OpKind.B)
        order.append([*runs, [ahead - 1]])  # the last of them is the first of the steady state
    return {
        "name": name,
        "flags": shlex.split(result.stdout, comments=True),
        "microbatches": schedule.microbatches,
        "expected": {"layers": counts, "forwards": order},
    }


@pytest.mark.slow
@needs("megatron")
def test_megatron_core_takes_the_flags_of_plans(tmp_path: Path) -> None:
    cases = [case(name, tmp_path) for name in PLANS]
    broken = ["allgather" if word == "flex" else word for word in cases[0]["flags"]]
    cases.append(cases[0] | {"name": "broken", "flags": broken})
    source, target = tmp_path / "cases.json", tmp_path / "results.json"
    source.write_text(json.dumps(cases))
    program = [sys.executable, str(Path(__file__).with_name("megatron_cases.py")), str(source), str(target)]
    paths = os.pathsep.join([str(TRAINERS), str(ROOT / "tests")])
    run = subprocess.run(program, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(target.read_text())
    assert results.pop("version") == RELEASE
    assert "overlap_moe_expert_parallel_comm" in results.pop("broken")["refused"]
    modules = {name: result.pop("modules", None) for name, result in results.items()}
    assert results == {each["name"]: each["expected"] for each in cases[:-1]}
    assert modules["full"] == ["layernorm", "moe", "mlp"]
    assert modules["pairs, act"] == ["layernorm", "moe_act"]
