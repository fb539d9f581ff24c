"""``overlap auto``: overlapped pairs run as cell programs; ``overlap off``: as one op after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from schedc.attachments.values import Attachments
from schedc.diagnostics import Diagnostic, Label
from schedc.ir.schedule import Schedule
from schedc.layout.parts import DECODER, Layout, PartKind
from schedc.plan.directives.base import Directive, Directives, Reading
from schedc.syntax.plan import LayersLine, LayoutLine, SettingLine


def _read(reading: Reading, line: SettingLine) -> None:
    if reading.word(line.value, ("auto", "off"), "way to overlap"):
        reading.give(overlap=line.value.text == "auto")


def _write(plan: Attachments) -> Iterator[str]:
    if plan.overlap and not plan.cells:
        yield "overlap auto"


def _check_lines(reading: Reading) -> None:
    lines = [line for line in reading.tree.lines if isinstance(line, SettingLine) and line.word == "overlap"]
    if "cell" in reading.spans and any(line.value.text == "off" for line in lines):
        message = "the order of a cell, and `overlap off`"
        reading.fault("S144", message, reading.span("overlap"), "leave one of the two out")


def _check_schedule(directives: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S148: a stage without layers in a pair that is to be overlapped."""
    pairs = np.flatnonzero(schedule.pair >= 0)
    if not directives.plan.overlap or not pairs.size:
        return
    kinds = list(PartKind)
    layers = layout.counts[:, [kinds.index(kind) for kind in (*DECODER, PartKind.MTP)]].sum(1)
    empty = pairs[layers[schedule.stage[pairs]] == 0]
    if not empty.size:
        return
    row = int(empty[0])
    stage = int(schedule.stage[row])
    line = next(line for line in directives.tree.lines if isinstance(line, LayersLine | LayoutLine))
    word = "overlap" if "overlap" in directives.spans else "cell"
    count = len(np.unique(schedule.pair[empty]))
    yield Diagnostic(
        "S148",
        f"stage {stage} holds no layer, and pairs need one there",
        Label(line.span, f"leaves stage {stage} without a layer"),
        (Label(directives.span(word), "pairs are to be overlapped"),),
        notes=(
            f"{count} pairs, the first with {schedule.describe(row)}: with nothing in it, nothing is hidden behind it",
        ),
        help="put a layer there (`at last` and `at [..]` say where paddings are), or leave `overlap` out",
        source=directives.tree.source,
    )


def _facts(plan: Attachments, _layout: Layout) -> dict[str, Any]:
    return {"overlap": plan.overlap}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if facts["overlap"]:
        orders = ", ".join(f"{cell['cell']} in the order of the plan" for cell in facts["cells"]) or "auto"
        yield f"overlap {orders}"


DIRECTIVE = Directive(
    "overlap", _read, _write, check_lines=_check_lines, check_schedule=_check_schedule, facts=_facts, text=_text
)
