"""What the commands tell about a plan: the facts of every directive as JSON, and as text made of that JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.attachments.values import Attachments
from schedc.ir.schedule import Schedule
from schedc.layout.parts import Layout
from schedc.plan.directives import DIRECTIVES
from schedc.plan.peak_memory import hot_slots
from schedc.plan.writer import write_plan


def to_json(plan: Attachments, layout: Layout, schedule: Schedule) -> dict[str, Any]:
    """The facts. Bytes and FLOPs are those of one microbatch; null where the plan says too little.

    ``held_bytes`` of hot experts are those of the fullest rank, at most.
    """
    facts: dict[str, Any] = {"text": write_plan(plan)}
    for directive in DIRECTIVES.values():
        facts |= directive.facts(plan, layout)
    if facts["hot"] is not None:
        facts["hot"]["held_bytes"] = int(hot_slots(plan, layout).held(schedule).max()) or None
    return facts


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """`to_json`'s facts for people, a line each."""
    for directive in DIRECTIVES.values():
        yield from directive.text(facts)
