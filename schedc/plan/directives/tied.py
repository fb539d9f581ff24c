"""``tied embedding``: the head and the predictions use the embedding's table, each rank with a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.ir.ties import Tie, lies_apart
from schedc.plan.directives.base import Directive, Directives, Reading
from schedc.plan.layout.parts import Layout, PartKind
from schedc.syntax.plan import SettingLine

_USERS = (PartKind.EMBEDDING, PartKind.MTP, PartKind.HEAD)


def ties_of_plan(plan: Plan, layout: Layout) -> tuple[Tie, ...]:
    """The stages that use the embedding's table, as one tie; its bytes are known once the model is there."""
    if not plan.tied:
        return ()
    stages = [stage for stage, held in enumerate(layout.stages) if any(part.kind in _USERS for part in held)]
    return (Tie(tuple(stages)),) if len(stages) > 1 else ()


def _read(reading: Reading, line: SettingLine) -> None:
    if reading.word(line.value, ("embedding",), "part whose weights others use"):
        reading.give(tied=True)


def _write(plan: Plan) -> Iterator[str]:
    if plan.tied:
        yield "tied embedding"


def _check_schedule(directives: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S303: two copies of each stage, and tied stages that do not share both ranks."""
    for tie in ties_of_plan(directives.plan, layout):
        if schedule.placement.pipes > 1 and lies_apart(tie, schedule.placement):
            stages = " and ".join(map(str, tie.stages))
            message = f"the stages {stages} are tied, have two copies each, and do not share their ranks"
            help = "put the predictions into the last stage, or take a schedule with one pipe"
            yield directives.fault("tied", "S303", message, help)


def _facts(plan: Plan, layout: Layout) -> dict[str, Any]:
    """tied: the stages that use the embedding's table; null where they do not share it."""
    return {"tied": [list(tie.stages) for tie in ties_of_plan(plan, layout)] if plan.tied else None}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    for stages in facts["tied"] or ():
        yield f"tied embedding: the stages {' and '.join(map(str, stages))} use one table, and sum its gradients"


DIRECTIVE = Directive("tied", _read, _write, check_schedule=_check_schedule, facts=_facts, text=_text)
