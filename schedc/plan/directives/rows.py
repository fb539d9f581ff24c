"""``rows fp8``: rows travel to their experts in fp8 with a scale each, and back in their own type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Plan
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import SettingLine
from schedc.units import shown


def _read(reading: Reading, line: SettingLine) -> None:
    if reading.word(line.value, ("same", "fp8"), "type of rows that travel"):
        reading.give(fp8_rows=line.value.text == "fp8")


def _write(plan: Plan) -> Iterator[str]:
    if plan.fp8_rows:
        yield "rows fp8"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """dispatch, combine: bytes of a row to the experts and back; null where the plan does not say its columns."""
    if not plan.fp8_rows:
        return {"rows": None}
    return {"rows": {"dispatch": plan.dispatch_row_bytes or None, "combine": plan.row_bytes or None}}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (rows := facts["rows"]) is not None:
        sizes = f": {shown(rows['dispatch'])} each, back {shown(rows['combine'])}" if rows["dispatch"] else ""
        yield f"rows travel to their experts in fp8{sizes}"


DIRECTIVE = Directive("rows", _read, _write, facts=_facts, text=_text)
