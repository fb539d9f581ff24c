"""Facts of searches for plans, made by hand: what `schedc plan --json` prints of a search, for tests of its views."""

from __future__ import annotations

from typing import Any

BARS = (
    "ideal", "GEMM and attention efficiency", "memory-bound ops and launch", "recomputation", "expert imbalance",
    "layout imbalance", "TP exposed", "EP exposed", "bubbles", "p2p", "CP", "DP exposed", "optimizer, rest",
)  # fmt: skip

_AXES: dict[str, Any] = {
    "tp": 8, "cp": 1, "pp": 16, "vpp": 2, "ep": 32, "dp": 48, "zero": 1, "microbatch": 1, "microbatches": 96,
    "schedule": "interleaved_overlap", "limit": 0, "recompute": "layer", "where": "chunk0", "layout": "balanced",
    "alltoall": "hierarchical", "overlap": True,
}  # fmt: skip
_SECONDS = (7.1, 3.2, 1.1, 1.3, 0.9, 0.3, 1.2, 0.8, 1.1, 0.2, 0.0, 0.5, 0.2)


def plan_facts(number: int, **changes: Any) -> dict[str, Any]:
    """The facts of the plan that is at place ``number`` from 1 on. changes: axes that differ from the first plan's."""
    seconds = [each + (0.1 * number if bar == "bubbles" else 0.0) for bar, each in zip(BARS, _SECONDS, strict=True)]
    step = sum(seconds)
    return {
        "file": f"{number:02}.sched",
        "axes": _AXES | changes,
        "free": ["alltoall"] if number == 2 else [],
        "step_s": step,
        "step_low_s": 0.9 * step,
        "step_high_s": 1.1 * step,
        "interval": {
            "low_s": 0.9 * step,
            "high_s": 1.1 * step,
            "rows_pct": 40.0,
            "wide": {"ep": 52.0},
            "undecided": ["ep"],
        },
        "makespan_s": step - 0.7,
        "tokens_per_s_per_device": 4608 * 8192 / 6144 / step,
        "mfu": 7.1 / step,
        "memory": {
            "peak_bytes": 51_000_000_000 - 3_000_000_000 * number,
            "needed_bytes": 52_000_000_000 - 3_000_000_000 * number,
            "rank": 0,
            "parts": {
                "states": 12_000_000_000,
                "activations": 39_000_000_000 - 3_000_000_000 * number,
                "buffers": 1_000_000_000,
            },
        },
        "waterfall": [{"what": bar, "seconds": each} for bar, each in zip(BARS, seconds, strict=True)],
        "floor_s": 0.97 * step,
    }


def search_facts(*plans: dict[str, Any]) -> dict[str, Any]:
    """The facts of a search that found these plans; by default three."""
    found = list(plans or (plan_facts(1), plan_facts(2, ep=16, dp=48), plan_facts(3, schedule="1f1b", overlap=False)))
    best, last = (found[0]["step_s"], found[-1]["step_s"]) if found else (17.0, 17.0)
    return {
        "schema": "schedc.plans",
        "version": 1,
        "model": {"name": "pangu-ultra-moe-718b", "parameters": 719_000_000_000, "active": 39_000_000_000},
        "cluster": {
            "name": "ascend-910b", "devices": 6144, "per_node": 8, "device": "910B", "usable_bytes": 60_000_000_000,
        },
        "batch": {"sequences": 4608, "seq": 8192},
        "also": [],
        "chances": None,
        "decided_by": [],
        "measure_next": [],
        "precision": "bf16",
        "skew": 1.0, "spread": 0.0, "constants": {},
        "origins": ["device and fabric: mindspeed, with rows of 910B", "stack: mbridge, the default"],
        "objective": "step",
        "fit": {"name": "mindspeed", "rows": 44, "cv_mape_pct": 11.2, "held_pct": 88.0, "hash": "1f2e",
                "forced": False},
        "space": {"raw": 7_340_032, "legal": 1_120_000, "fit": 402_113,
                  "restrictions": ["experts not split by tp"], "facts": []},
        "counts": {"bounded": 1_120_000, "simulated": 2419, "orders": 93, "priced": 14},
        "seconds": {"cpu": 24.9, "wall": 26.5, "by_stage": {"bound": 2.1, "simulate": 8.2, "price": 14.6}},
        "certificate": {"complete": True, "bound_s": best, "kth_s": last, "ended_early": False,
                        "policies": {"ordered": 0, "left": 0, "bound_s": None}},
        "plans": found,
        "pareto": [
            {"step_s": plan["step_s"], "bytes": plan["memory"]["needed_bytes"], "file": plan["file"]} for plan in found
        ]
        + [{"step_s": best + 2, "bytes": 30_000_000_000, "file": ""}],
        "axis_ends": ["vpp 2 is the largest tried"],
        "extrapolates": [],
        "left_out": [],
    }  # fmt: skip


def slider_facts(*files: str) -> dict[str, Any]:
    """Sliders of plans: each is slower than the one before. The first one is slower at lower values, too."""
    ties = [{"plan": files[1], "value": 0.22, "widths": -1.0, "times": 0.5, "step_s": 18.1}]
    steps = [
        [18.0 + 0.2 * (2 - at) if not number else 18.05 + 0.15 * number for number in range(len(files))]
        for at in range(3)
    ]
    constant = {
        "name": "grouped",
        "unit": "of peak",
        "says": "products of experts",
        "value": 0.44,
        "width": 0.6931471805599453,
        "whole": False,
        "values": [0.11, 0.22, 0.44],
        "steps_s": steps,
        "ties": ties,
    }
    figure = constant | {
        "name": "rail.Bps",
        "unit": "B/s",
        "says": "bytes per second",
        "value": 50e9,
        "width": None,
        "values": [12.5e9, 25e9, 50e9],
        "ties": [],
    }
    memory = constant | {
        "name": "device.usable",
        "unit": "",
        "says": "usable memory",
        "value": 0.9,
        "width": None,
        "values": [0.45, 0.9],
        "steps_s": [[None] * len(files), steps[2]],
        "ties": [],
    }
    return {"plans": [*files], "equal": [], "settings": [constant, figure, memory], "no_effect": ["cp"]}  # fmt: skip
