"""What the commands tell about a plan: the facts of every directive as JSON, and as text made of that JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.attachments.values import Attachments
from schedc.layout.parts import Layout
from schedc.plan.directives import DIRECTIVES
from schedc.plan.writer import write_plan


def to_json(plan: Attachments, layout: Layout) -> dict[str, Any]:
    """The facts. Bytes and FLOPs are those of one microbatch; null where the plan says too little."""
    facts = {"text": write_plan(plan)}
    for directive in DIRECTIVES.values():
        facts |= directive.facts(plan, layout)
    return facts


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """`to_json`'s facts for people, a line each."""
    for directive in DIRECTIVES.values():
        yield from directive.text(facts)
