"""``slices chunk 0 2``: a microbatch runs as so many slices of its rows inside each cell of these stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.placement import Placement
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.ir.scopes import SCOPES, line_per_stage
from schedc.plan.directives.base import Directive, Directives, Reading, SlicesRequest, scope_faults
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import SettingLine, SlicesLine, Word


def _read(reading: Reading, line: SlicesLine) -> None:
    scope: str = "all"
    numbers: tuple[int, ...] = ()
    if line.where is not None:
        scope, numbers = line.where.name, tuple(int(number) for number in line.where.numbers)
        if scope not in SCOPES[1:]:
            reading.word(Word(scope, line.where.span), SCOPES[1:], "part of a model")
            return
    reading.slices.append(SlicesRequest(scope, numbers, line.count, line.span))


def _write(plan: Plan) -> Iterator[str]:
    """A line for each number of slices, with its stages; none for the stages that have no slices."""
    for count in dict.fromkeys(plan.slices):
        stages = [stage for stage, own in enumerate(plan.slices) if own == count]
        where = "" if len(stages) == len(plan.slices) else f"stage [{', '.join(map(str, stages))}] "
        if count > 1:
            yield f"slices {where}{count}"


def _check_lines(reading: Reading) -> None:
    off = (line for line in reading.tree.lines if isinstance(line, SettingLine) and line.word == "overlap")
    if any(request.count > 1 for request in reading.slices) and any(line.value.text == "off" for line in off):
        message = "`slices`, whose exchanges hide behind each other's compute, and `overlap off`"
        reading.fault("S144", message, reading.span("overlap"), "leave one of the two out")


def slices_per_stage(
    requests: Sequence[SlicesRequest], stages: int, placement: Placement | None = None
) -> tuple[int, ...]:
    """[stages] number of slices; empty where no stage has more than one. Requests for chunks need the placement."""
    if not requests:
        return ()
    lines = line_per_stage(requests, stages, placement)
    counts = tuple(lines[stage].count if stage in lines else 1 for stage in range(stages))
    return counts if max(counts, default=1) > 1 else ()


def _check_schedule(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S153: lines about stages or chunks that do not exist, or two numbers for one stage."""
    lines = [(request, request.span) for request in directives.slices]
    yield from scope_faults("S153", "two numbers of slices", lines, directives, schedule)


def _resolve(directives: Directives, schedule: Schedule) -> dict[str, Any]:
    return {"slices": slices_per_stage(directives.slices, schedule.stages, schedule.placement)}


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    return {"slices": list(plan.slices)} if plan.slices else {}


def slices_text(facts: dict[str, Any]) -> Iterator[str]:
    """Neighbouring stages with the same number share a line."""
    for count, group in groupby(enumerate(facts.get("slices", ())), key=lambda pair: pair[1]):
        stages = [stage for stage, _ in group]
        where = f"stages {stages[0]}-{stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
        if count > 1:
            yield f"slices {count} on {where}"


DIRECTIVE = Directive(
    "slices",
    _read,
    _write,
    several=True,
    check_lines=_check_lines,
    check_schedule=_check_schedule,
    resolve=_resolve,
    facts=_facts,
    text=slices_text,
)
