"""``capacity 1.25 drop probs``: rows of an expert over their mean; an expert drops the rows beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Capacity, Drop, Plan
from schedc.plan.counts.rows import routing_of
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.step.costs.exchange import capacity_rows
from schedc.syntax.plan import FactorLine
from schedc.units import digits


def _read(reading: Reading, line: FactorLine) -> None:
    drop = Drop.PROBS
    if line.words:
        option, value = line.words
        ways = [str(way) for way in Drop]
        if not (reading.word(option, ("drop",), "part of a capacity") and reading.word(value, ways, "way to drop")):
            return
        drop = Drop(value.text)
    reading.give(capacity=Capacity(line.factor, drop))


def _write(plan: Plan) -> Iterator[str]:
    if plan.capacity is not None:
        yield f"capacity {digits(plan.capacity.factor)} drop {plan.capacity.drop}"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """rows: how many an expert takes from one rank; null where the plan does not say how many tokens there are."""
    if plan.capacity is None:
        return {"capacity": None}
    rows = None
    if plan.experts is not None and plan.tokens:
        rows = capacity_rows(plan.tokens, routing_of(plan.experts), plan.capacity.factor)
    return {"capacity": {"factor": plan.capacity.factor, "drop": str(plan.capacity.drop), "rows": rows}}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (capacity := facts["capacity"]) is not None:
        rows = "" if capacity["rows"] is None else f": {capacity['rows']} rows of an expert from each rank"
        yield f"capacity {capacity['factor']:g} drop {capacity['drop']}{rows}"


DIRECTIVE = Directive("capacity", _read, _write, facts=_facts, text=_text)
