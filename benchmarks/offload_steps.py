"""Steps under a cap, as `schedc check` prices them: with offloads, with recomputation, and with both.

`benchmarks/offload.py` runs this with ``--cap``. Times are simulated, not measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from schedc.compiler import Analysis, analyse
from schedc.diagnostics import DiagnosticError
from schedc.plan.counts.layers import counted_layer
from schedc.plan.writer import read_plan
from schedc.report.check import to_json
from schedc.step.costs.costs import Costs

SPEED, FLOPS = 50e9, 400e12
"""Bytes per second of a lane to the host, and FLOPs per second of a device."""

LAYERS = {
    "llama2-70b": ("dense", "block hidden 8192 heads 64 keys 8 inner 28672  tokens 4096 dtype bf16"),
    "dsv3": (
        "moe",
        "experts 256 top 8 shared 1 width 2048 hidden 7168  tokens 4096 dtype bf16"
        "  block heads 128 head 128 rotary 64 query 1536 latent 512 sequence 4096",
    ),
}
"""Kind and sizes of each model's layers."""
RANKS, MICROBATCHES, PER_RANK = 8, 64, 8


def planned(schedule: str, sizes: dict[str, int], lines: str, costs: Costs) -> Analysis:
    """A schedule with these lines in its plan, analysed."""
    given = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.sched"
        text = f"sched 1\n\nplan a = {schedule}({given}) {{\n  {lines}\n}}\n"
        file.write_text(text.replace("()", ""), encoding="utf-8")
        return analyse(f"{file}:a", {}, costs)


def capped(schedule: str, sizes: dict[str, int], cap: float, move: float) -> dict[str, Any]:
    """`offload auto` under a share of the fullest rank's memory; a move takes ``move`` forwards."""
    stages = analyse(schedule, sizes).schedule.stages
    whole = planned(schedule, sizes, f"layers {stages}", Costs())
    fullest = float(whole.memory.peak_memory.max())
    limit = cap * fullest
    analysis = planned(
        schedule, sizes, f"layers {stages}  memory {limit:.9f}  host 1000000 at {1 / move:.9f}  offload auto", Costs()
    )
    facts = to_json(analysis)["offload"]
    return {
        "schedule": schedule, "sizes": sizes, "cap": cap, "move": move,
        "makespan_over_uncapped": facts["makespan_over_uncapped"],
        "moved": facts["moved"],
        "peak_over_cap": float(analysis.memory.peak_memory.max()) / limit,
    }  # fmt: skip


def against_recompute(layer: str, cap: float) -> dict[str, Any]:
    """Offload, the cheapest recomputation, and both, under a share of the activations of the fullest rank."""
    kind, sizes = LAYERS[layer]
    plan, experts = read_plan(sizes, 1), kind == "moe"
    counted = counted_layer(plan, experts)
    held, flops = (counted.held() * plan.tokens, counted.flops * plan.tokens) if counted else (0.0, 0.0)
    forward = flops / FLOPS * 1e3
    costs = Costs(F=forward, I=forward, W=forward)
    dense = RANKS * PER_RANK if kind == "dense" else 0
    limit = cap * held * PER_RANK * RANKS
    lines = f"layers {RANKS * PER_RANK} dense {dense}  {sizes}  parameters {kind} 0 MB  memory {limit / 1e9:.6f} GB"
    host = f"host 100000 GB at {SPEED / 1e9:g} GB/s  offload auto"
    facts = {
        name: _facts(f"{lines}  {more}", costs)
        for name, more in (("recompute", "recompute auto"), ("offload", host), ("both", f"recompute auto  {host}"))
    }
    over = {name: each and _over(each) for name, each in facts.items()}
    single = facts["recompute"] and facts["recompute"]["recompute_auto"]["one_level"]
    one_level = single["over_uncapped"] if single else None
    alone = [value for name, value in over.items() if name != "both" and value is not None]
    both = over["both"]
    transfer = held / SPEED * 1e3 / forward
    return {
        "layer": layer, "cap": cap, "bytes_per_layer": held, "transfer_over_forward": transfer,
        "over_uncapped": over | {"one_level": one_level},
        "speedup_over_cheapest_recompute": _ratio(over["recompute"], over["offload"]),
        "speedup_over_one_level": _ratio(one_level, over["offload"]),
        "auto_over_better": _ratio(min(alone), both) if alone else None,
        "condition": f"a layer's transfer takes {transfer:.2f} of its forward "
        f"({held:.4g} bytes at {SPEED:.3g} B/s, {flops:.4g} FLOPs at {FLOPS:.3g}/s); "
        "free in a steady state up to the forward and backward together",
    }  # fmt: skip


def _facts(lines: str, costs: Costs) -> dict[str, Any] | None:
    """What `check` says of a step; None where nothing fits."""
    try:
        return to_json(planned("1f1b", {"P": RANKS, "M": MICROBATCHES}, lines, costs))
    except DiagnosticError as error:
        if {finding.code for finding in error.diagnostics} != {"S406"}:
            raise
        return None


def _over(facts: dict[str, Any]) -> float:
    """The step over that of the same order without a cap."""
    return float(facts.get("makespan_over_uncapped") or facts["offload"]["makespan_over_uncapped"])


def _ratio(slower: float | None, faster: float | None) -> float | None:
    return None if slower is None or faster is None else slower / faster
