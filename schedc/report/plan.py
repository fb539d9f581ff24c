"""What the commands tell of a plan: the All-to-All and why, bytes by lane, drops, hot experts, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from schedc.cost.exchange import capacity_rows, choose, hot_break_even
from schedc.layout.parts import Layout, PartKind
from schedc.plan.recompute_bytes import layer_bytes, saving, slot_bytes
from schedc.plan.row_counts import arriving_rows, routing_of, travelling_rows
from schedc.plan.units import shown
from schedc.plan.values import BYTES, Attachments, Method
from schedc.plan.writer import write_plan


def to_json(plan: Attachments, layout: Layout) -> dict[str, Any]:
    """The facts. Bytes and FLOPs are of one microbatch; what the plan says too little for is null."""
    return {
        "text": write_plan(plan),
        "alltoall": _alltoall(plan),
        "overlap": plan.overlap,
        "cells": [
            {"cell": " & ".join(cell.kind), "compute": list(cell.compute), "comm": list(cell.communication)}
            for cell in plan.cells
        ],
        "capacity": _capacity(plan),
        "hot": _hot(plan),
        "recompute": _recompute(plan, layout),
    }


def _alltoall(plan: Attachments) -> dict[str, Any]:
    """The method and why; rows and bytes per token that a rank sends in one dispatch, by method and lane."""
    moved, row = travelling_rows(plan), plan.row_bytes
    return {
        "method": str(plan.method),
        "why": _why(plan),
        "rows_per_token": {method: {"rail": rows.rail, "node": rows.node} for method, rows in moved.items()},
        "bytes_per_token": {
            method: {"rail": rows.rail * row, "node": rows.node * row} for method, rows in moved.items()
        }
        if row
        else None,
    }


def _why(plan: Attachments) -> str:
    if plan.method is Method.AUTO:
        return "chosen when the ranks are known: the plan has no `topology`, or no `experts`"
    if plan.experts is None or plan.topology is None:
        return "said by the plan, or the default"
    size = float(max(plan.row_bytes, 1) * max(plan.tokens, 1))
    choice = choose(routing_of(plan.experts), plan.topology, size)
    if choice.method == plan.method:
        return choice.why
    return f"as the plan has it; by the closed form {choice.method} is better: {choice.why}"


def _capacity(plan: Attachments) -> dict[str, Any] | None:
    """rows: of an expert from one rank, if the plan says how many tokens there are."""
    if plan.capacity is None:
        return None
    known = plan.experts is not None and plan.tokens
    rows = (
        capacity_rows(plan.tokens, routing_of(plan.experts), plan.capacity.factor) if known and plan.experts else None
    )
    return {"factor": plan.capacity.factor, "drop": str(plan.capacity.drop), "rows": rows}


def _hot(plan: Attachments) -> dict[str, Any] | None:
    """break_even_rows: of an expert on a rank, from which on a copy of it moves fewer bytes than its rows do.

    off: why there will be none in spite of the line, or None.
    """
    if plan.hot is None:
        return None
    experts = plan.experts
    sized = experts is not None and experts.width and experts.hidden
    most = plan.hot.most
    if most is None and experts is not None and plan.topology is not None:
        most = experts.count // plan.topology.ranks
    return {
        "most": most,
        "auto": plan.hot.most is None,
        "until_imbalance_below": plan.hot.below,
        "off": "with a capacity all ranks have equally many rows" if plan.capacity else None,
        "break_even_rows": hot_break_even(experts.width, *2 * (BYTES[plan.dtype],)) if experts and sized else None,
        "slot_bytes": most * slot_bytes(experts, plan.dtype) if most and experts and sized else None,
    }


def _recompute(plan: Attachments, layout: Layout) -> list[dict[str, Any]]:
    """[stages] the level, and what it saves and costs per microbatch over the MoE layers of the stage."""
    experts = plan.experts
    sized = experts is not None and experts.width and experts.hidden and plan.tokens
    kinds = list(PartKind)
    layers = layout.counts[:, [kinds.index(PartKind.MOE), kinds.index(PartKind.MTP)]].sum(1).tolist()
    found = []
    for stage, level in enumerate(plan.recompute):
        row: dict[str, Any] = {"stage": stage, "level": str(level.level), "adaptive": level.adaptive}
        row |= {"by": str(level.by) if level.adaptive is not None else None, "moe_layers": layers[stage]}
        row["in_bubbles"] = level.bubbles
        if experts is not None and sized:
            one, number = saving(experts, plan.dtype, level.level, arriving_rows(plan)), layers[stage] * plan.tokens
            row |= {
                "bytes_saved": one.bytes * number,
                "bytes_without": layer_bytes(experts, plan.dtype) * number,
                "extra_flops": one.flops * number,
            }
        else:
            row |= {"bytes_saved": None, "bytes_without": None, "extra_flops": None}
        found.append(row)
    return found


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """`to_json`'s facts for people, a line each."""
    exchange = facts["alltoall"]
    if exchange["rows_per_token"] or exchange["method"] != Method.FLAT:
        yield f"alltoall {exchange['method']}: {exchange['why']}"
    for method, rows in exchange["rows_per_token"].items():
        size = exchange["bytes_per_token"]
        bytes_of = f", {shown(size[method]['rail'])} and {shown(size[method]['node'])}" if size else ""
        mark = "*" if method == exchange["method"] else " "
        said = f"{rows['rail']:.3f} rows per token by rail, {rows['node']:.3f} inside a node"
        yield f" {mark} {method:<12} {said}{bytes_of}"
    if facts["overlap"]:
        orders = ", ".join(f"{cell['cell']} in the order of the plan" for cell in facts["cells"]) or "auto"
        yield f"overlap {orders}"
    yield from _of_capacity(facts["capacity"])
    yield from _of_hot(facts["hot"])
    yield from _of_recompute(facts["recompute"])


def _of_capacity(capacity: dict[str, Any] | None) -> Iterator[str]:
    if capacity is not None:
        rows = "" if capacity["rows"] is None else f": {capacity['rows']} rows of an expert from each rank"
        yield f"capacity {capacity['factor']:g} drop {capacity['drop']}{rows}"


def _of_hot(hot: dict[str, Any] | None) -> Iterator[str]:
    if hot is None:
        return
    if hot["off"]:
        yield f"hot: none, {hot['off']}"
        return
    most = "as many as pay" if hot["most"] is None else f"at most {hot['most']}"
    until = (
        ""
        if hot["until_imbalance_below"] is None
        else f", until the imbalance is below {hot['until_imbalance_below']:g}"
    )
    even = hot["break_even_rows"]
    pays = "" if even is None else f"; a copy pays from {even} rows on a rank"
    slots = f"; slots take {shown(hot['slot_bytes'])} per layer and microbatch in flight" if hot["slot_bytes"] else ""
    yield f"hot {most}{until}{pays}{slots}"


def _of_recompute(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Neighbouring stages with the same level and layers on one line."""
    for _, group in groupby(rows, key=lambda row: {**row, "stage": 0}):
        stages = [row["stage"] for row in group]
        first = rows[stages[0]]
        where = f"stages {stages[0]}-{stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
        how = "" if first["adaptive"] is None else f" adaptive({first['adaptive']:g}) by {first['by']}"
        how += " in bubbles" * first["in_bubbles"]
        if first["bytes_saved"] is None:
            yield f"recompute {first['level']}{how} on {where}"
            continue
        whole = first["bytes_without"]
        share = f" ({first['bytes_saved'] / whole:.1%})" if whole else ""
        saved = f"saves {shown(first['bytes_saved'])}{share} of a microbatch for {first['extra_flops']:.3g} FLOPs"
        yield f"recompute {first['level']}{how} on {where}: {saved}"
