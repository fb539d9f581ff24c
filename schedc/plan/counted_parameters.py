"""Tells what the memory of a plan counts as parameters, and what it cannot know."""

from __future__ import annotations

from typing import Any

from schedc.attachments.parameter_counts import moe_parameter_bytes, moe_parameters
from schedc.ir.plan import Plan
from schedc.layout.parts import Layout, PartKind
from schedc.syntax.plan import PlanTree, TableLine

_NAMES = {
    PartKind.DENSE: "dense layers",
    PartKind.MOE: "MoE layers",
    PartKind.MTP: "predictions",
    PartKind.EMBEDDING: "the embedding",
    PartKind.HEAD: "the head",
}
_EXPERTS = (PartKind.MOE, PartKind.MTP)


def parameter_facts(tree: PlanTree, plan: Plan, layout: Layout) -> dict[str, Any]:
    """``moe_layer`` and ``moe_layer_bytes``: experts and router of a layer on a rank; ``unknown``: counted as 0.

    ``states``: bytes of a parameter beside its weight, which ``moe_layer_bytes`` has in it.
    Empty for a plan whose memory is not in bytes. What a ``parameters`` line gives is not among the unknown.
    """
    if tree.memory is None or not tree.memory.unit:
        return {}
    tables = [line for line in tree.lines if isinstance(line, TableLine) and line.word == "parameters"]
    written = {entry.name for line in tables for entry in line.entries}
    missing = [kind for kind in _NAMES if layout.total(kind) and str(kind) not in written]
    count = moe_parameters(plan)
    derived = [kind for kind in missing if kind in _EXPERTS and count is not None]
    unknown = ["attention"] * bool(derived) + [_NAMES[kind] for kind in missing if kind not in derived]
    return {
        "parameters": {
            "moe_layer": count if derived else None,
            "moe_layer_bytes": moe_parameter_bytes(plan) if derived else None,
            "states": plan.states,
            "unknown": unknown,
        }
    }
