"""What the commands tell about a plan: the facts of every directive as JSON, and as text made of that JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.plan.counts.parameters import knows_attention, layer_parameters, parameter_bytes
from schedc.plan.counts.split_ranks import kept_gathered
from schedc.plan.directives import DIRECTIVES
from schedc.plan.held_memory import hot_slots, most_held
from schedc.plan.layout.parts import KIND_NAMES, WITH_EXPERTS, Layout, PartKind
from schedc.plan.writer import write_plan
from schedc.units import shown


def to_json(plan: Plan, layout: Layout, schedule: Schedule) -> dict[str, Any]:
    """The facts. Bytes and FLOPs are those of one microbatch; null where the plan says too little.

    ``held_bytes`` of hot experts are those of the fullest rank, at most.
    """
    facts: dict[str, Any] = {"text": write_plan(plan)}
    for directive in DIRECTIVES.values():
        facts |= directive.facts(plan, layout)
    for copies in (facts["hot"], facts["balance"]):
        if copies is not None:
            copies["held_bytes"] = int(hot_slots(plan, layout).held(schedule).max()) or None
    splits = plan.parallel is not None and plan.parallel.tp * plan.parallel.cp > 1
    if splits and (more := kept_gathered(plan, layout)) is not None:
        facts["parallel"]["gathered"] = more[0].tolist()
        facts["parallel"]["gathered_peak"] = int(most_held(schedule, *more).max())
    return facts


def parameter_facts(written: Collection[str], plan: Plan, layout: Layout) -> dict[str, Any]:
    """``moe_layer`` and ``moe_layer_bytes``: what a rank holds of a layer; ``unknown``: counted as 0.

    ``states``: bytes of a parameter beside its weight; ``moe_layer_bytes`` includes them.
    written: the kinds of a ``parameters`` line, which are not among the unknown.
    """
    missing = [kind for kind in KIND_NAMES if layout.total(kind) and str(kind) not in written]
    count = layer_parameters(plan)
    derived = [kind for kind in missing if kind in WITH_EXPERTS and count is not None]
    unknown = [KIND_NAMES[kind] for kind in missing if kind not in derived]
    if derived and not knows_attention(plan):
        unknown = ["attention", *unknown]
    return {
        "parameters": {
            "moe_layer": count if derived else None,
            "moe_layer_bytes": int(parameter_bytes(plan)["moe"]) if derived else None,
            "states": plan.states,
            "unknown": unknown,
        }
    }


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """`to_json`'s facts for people, a line each."""
    for directive in DIRECTIVES.values():
        yield from directive.text(facts)
    if held := (facts.get("parallel") or {}).get("gathered_peak"):
        yield f"what ranks gather and keep: {shown(held)} on the fullest one, beside the memory of the plan"
        yield "(inputs of cores, keys and values; Megatron-LM gathers inputs a second time, and keeps none)"
    yield from _parameters(facts.get("parameters"))
    for warning in facts.get("warnings", ()):
        place = f"{warning['file']}:{warning['line']}"
        yield f"warning[{warning['code']}] at {place}: {warning['message']}; {warning['help']}"


def _parameters(facts: dict[str, Any] | None) -> Iterator[str]:
    """What the memory counts as parameters, and what it does not; nothing for a plan without a memory in bytes."""
    if facts and facts["states"] and not facts["moe_layer"]:
        counts = "it counts for experts with sizes and without `parameters moe`"
        yield f"states {facts['states']:g} does not count in `memory`: {counts}"
    if facts and facts["moe_layer"]:
        held = f"{shown(facts['moe_layer_bytes'])} {'with their states' if facts['states'] else 'of weights alone'}"
        parameters = f"{facts['moe_layer']:,} parameters on a rank, {held}"
        what = "experts and router have" if "attention" in facts["unknown"] else "it has"
        yield f"memory of a MoE layer: {what} {parameters}"
    if facts and facts["unknown"]:
        *first, last = facts["unknown"]
        names = f"{', '.join(first)} and {last}" if first else last
        yield f"parameters of {names} are not known: counted as 0"
        kind = next((kind for kind, name in KIND_NAMES.items() if name in facts["unknown"]), PartKind.MOE)
        yield f"(`parameters {kind} 25 MB` says the bytes of one with its gradient and optimizer)"
