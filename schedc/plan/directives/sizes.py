"""``sizes bounded 1.25``: buffers of so many times the mean rows, whose sizes the host knows without asking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Plan
from schedc.plan.counts.rows import routing_of
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.step.costs.exchange import bounded_rows
from schedc.syntax.plan import SizesLine
from schedc.units import digits


def _read(reading: Reading, line: SizesLine) -> None:
    if not reading.word(line.value, ("exact", "bounded"), "way to size exchanges"):
        return
    if line.value.text == "exact" and line.factor is not None:
        reading.fault("S144", "exact sizes, and a number", line.span, "write `sizes exact`")
    elif line.value.text == "bounded" and line.factor is None:
        help = "write `sizes bounded 1.25` for buffers of 1.25 times the mean rows"
        reading.fault("S144", "bounded sizes, and not by how much", line.span, help)
    else:
        reading.give(bound=line.factor)


def _write(plan: Plan) -> Iterator[str]:
    if plan.bound is not None:
        yield f"sizes bounded {digits(plan.bound)}"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """rows: size of the buffer for the rows of one rank's experts; null without tokens and ranks of the plan."""
    if plan.bound is None:
        return {"sizes": None}
    rows = None
    if plan.experts is not None and plan.topology is not None and plan.tokens:
        pair = bounded_rows(plan.tokens, routing_of(plan.experts), plan.topology, plan.bound).pair
        rows = plan.topology.ranks * pair
    return {"sizes": {"bound": plan.bound, "rows": rows}}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (sizes := facts["sizes"]) is not None:
        rows = "" if sizes["rows"] is None else f": {sizes['rows']} rows on each rank"
        yield f"sizes bounded {sizes['bound']:g}{rows}; a step with more runs again with exact sizes"


DIRECTIVE = Directive("sizes", _read, _write, facts=_facts, text=_text)
