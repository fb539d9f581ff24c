"""``migrate every 50 steps when gain > 1 %``: experts that move to other ranks between steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Migrate, Plan
from schedc.plan.counts.layers import moe_layer
from schedc.plan.directives.base import Directive, Directives
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import MigrateLine
from schedc.units import digits, shown

_WORDS = ("every", "steps", "gain", ">", "%")


def _read(reading: Directives, line: MigrateLine) -> None:
    for word, expected in zip(line.words, _WORDS, strict=False):
        if not reading.word(word, (expected,), "part of a migration"):
            return
    reading.give(migrate=Migrate(line.steps, line.gain))


def _write(plan: Plan) -> Iterator[str]:
    if plan.migrate is not None:
        when = f" when gain > {digits(plan.migrate.gain)} %" if plan.migrate.gain else ""
        yield f"migrate every {plan.migrate.steps} steps{when}"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """gain: percent of the time of a rank's experts in a step. expert_bytes: weights and states of one expert; null
    where the plan does not say the sizes. move_seconds: its way to another node, or inside the only one; null where no
    speed is said."""
    if (migrate := plan.migrate) is None:
        return {"migrate": None}
    size = None
    if plan.experts and plan.has_expert_sizes:
        layer = moe_layer(plan, plan.experts)
        size = layer.slot_bytes + layer.parameters_of_an_expert * plan.states
    topology = plan.topology
    speed = 0.0 if topology is None else topology.rail if topology.nodes > 1 else topology.node
    facts = {"steps": migrate.steps, "gain": migrate.gain, "expert_bytes": size}
    return {"migrate": {**facts, "move_seconds": size / speed if size and speed else None}}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (migrate := facts["migrate"]) is None:
        return
    least = f" where a step gains more than {migrate['gain']:g} %" if migrate["gain"] else " where a step gains"
    size, seconds = migrate["expert_bytes"], migrate["move_seconds"]
    moved = "" if size is None else f"; an expert is {shown(size)} with its states"
    way = "" if seconds is None else f", {1e3 * seconds:.3g} ms on its way"
    yield f"experts migrate every {migrate['steps']} steps{least}{moved}{way}"


ROWS = (Directive("migrate", _read, _write, facts=_facts, text=_text),)
