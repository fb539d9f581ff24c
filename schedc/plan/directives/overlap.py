"""``overlap auto``: overlapped pairs run as cell programs; ``overlap off``: as one op after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Plan
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import SettingLine


def _read(reading: Reading, line: SettingLine) -> None:
    if reading.word(line.value, ("auto", "off"), "way to overlap"):
        reading.give(overlap=line.value.text == "auto")


def _write(plan: Plan) -> Iterator[str]:
    if plan.overlap and not plan.cells:
        yield "overlap auto"


def _check_lines(reading: Reading) -> None:
    lines = [line for line in reading.tree.lines if isinstance(line, SettingLine) and line.word == "overlap"]
    if "cell" in reading.spans and any(line.value.text == "off" for line in lines):
        message = "the order of a cell, and `overlap off`"
        reading.fault("S144", message, reading.span("overlap"), "leave one of the two out")


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    return {"overlap": plan.overlap}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if facts["overlap"]:
        orders = ", ".join(f"{cell['cell']} in the order of the plan" for cell in facts["cells"]) or "auto"
        yield f"overlap {orders}"


DIRECTIVE = Directive("overlap", _read, _write, check_lines=_check_lines, facts=_facts, text=_text)
