"""``cell F & B { compute B.mlp.I F.mlp comm F.dispatch }``: the order inside overlapped pairs, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from schedc.cell import PlanOrder, cell_program, stage_shape
from schedc.cell.costs import CellCosts
from schedc.cell.graph import Lane
from schedc.cell.written_order import ALIASES
from schedc.diagnostics import Diagnostic, DiagnosticError, did_you_mean
from schedc.ir.ops import OpKind
from schedc.ir.plan import CELL_EXCHANGES, CELL_SEGMENTS, CellPlan, Plan
from schedc.ir.schedule import Schedule
from schedc.plan.directives.base import Directive, Directives
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import CellLane, CellLine


def _read(reading: Directives, line: CellLine) -> None:
    kind = line.first.text + line.second.text
    if kind not in ("FB", "FI"):
        message = f"a cell `{line.first.text} & {line.second.text}`"
        help = "a W in a pair fills gaps: leave its order to `overlap auto`"
        reading.report("S147", message, line.second.span, help if "W" in kind else "write F & B or F & I")
        return
    repeated = f"cell {kind}" in reading.spans
    reading.spans.setdefault(f"cell {kind}", line.span)
    lanes = {lane.name.text: lane for lane in line.lanes}
    good = [reading.word(lane.name, ("compute", "comm"), "lane of a cell") for lane in line.lanes]
    if repeated or len(lanes) < len(line.lanes):
        help = "keep a single order, with a `compute` and a `comm` lane"
        reading.report("S147", "an order that is given twice", line.span, help)
    elif line.value is not None:
        if reading.word(line.value, ("auto",), "order of a cell"):
            reading.give(overlap=True)
    elif not lanes or not all(lane.steps for lane in line.lanes):
        help = "name steps, as `compute F.attn B.mlp.I comm F.dispatch`, or write `cell F & B auto`"
        reading.report("S147", "a cell, or a lane of it, without steps", line.span, help)
    elif all(good):
        compute = _steps(reading, lanes.get("compute"), CELL_SEGMENTS, ("", "I", "W"))
        communication = _steps(reading, lanes.get("comm"), CELL_EXCHANGES, ("",))
        reading.give(overlap=True, cells=(*reading.plan.cells, CellPlan(kind, compute, communication)))


def _steps(
    reading: Directives, lane: CellLane | None, roles: tuple[str, ...], parts: tuple[str, ...]
) -> tuple[str, ...]:
    """The steps of a lane under the names of the roles, ``F.attention`` for ``F.attn``."""
    steps: list[str] = []
    for step in lane.steps if lane else ():
        letter, role, *part = step.text.split(".")
        role = ALIASES.get(role, role)
        name = ".".join((letter, role, *part))
        if letter not in ("F", "B") or len(part) > 1 or (part and (part[0] not in parts or letter == "F")):
            help = "write F.role, B.role.I or B.role.W; exchanges have no part"
            reading.report("S147", f"`{step.text}` is no step", step.span, help)
        elif role not in roles:
            help = did_you_mean(role, (*roles, *(ALIASES if roles is CELL_SEGMENTS else ())))
            if role in (*CELL_SEGMENTS, *CELL_EXCHANGES):
                help = "segments stand in `compute`, exchanges in `comm`"
            reading.report("S147", f"`{role}` is no step of this lane", step.span, help)
        elif name in steps:
            message = f"`{step.text}` appears twice in one lane"
            reading.report("S147", message, step.span, "name each step of a layer once")
        else:
            steps.append(name)
    return tuple(steps)


def _write(plan: Plan) -> Iterator[str]:
    for cell in plan.cells:
        lanes = f"compute {' '.join(cell.compute)} " * bool(cell.compute)
        lanes += f"comm {' '.join(cell.communication)} " * bool(cell.communication)
        yield f"cell {cell.kind[0]} & {cell.kind[1]} {f'{{ {lanes}}}' if lanes else 'auto'}"


def _check_schedule(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S147: an order for a kind of pair that the schedule does not have."""
    paired = np.flatnonzero(schedule.pair >= 0)
    forwards = schedule.kind[paired[::2]] == OpKind.F
    present = {f"F{OpKind(kind).name}" for kind in np.unique(schedule.kind[paired[1::2]][forwards]).tolist()}
    for cell in directives.plan.cells:
        if cell.kind not in present:
            pairs = [" & ".join(kind) for kind in ("FB", "FI") if kind in present]
            none = "a W in a pair fills gaps" if paired.size else "it has no pairs"
            message = f"an order for pairs {' & '.join(cell.kind)}, and the schedule has none"
            help = f"its pairs are {' and '.join(pairs)}" if pairs else f"{none}: leave the order out"
            yield directives.fault(f"cell {cell.kind}", "S147", message, help)


def _resolve(directives: Directives, _schedule: Schedule) -> dict[str, Any]:
    return {"cells": tuple(_turned(directives, cell) for cell in directives.plan.cells)}


def _turned(directives: Directives, cell: CellPlan) -> CellPlan:
    """The order with each lane turned so that it can run, tried on a MoE layer of standard segments.

    A lane repeats layer after layer, so the step that its text begins with says nothing. Raises `DiagnosticError`
    (S323) at the line of an order that cannot run from any step.
    """
    shared = bool(directives.plan.experts and directives.plan.experts.shared)
    shape = stage_shape(["moe"], shared=shared, hot=Lane.RAIL if directives.plan.copies_by_microbatch else None)
    source, span = directives.tree.source, directives.span(f"cell {cell.kind}")
    turns = product(range(max(len(cell.compute), 1)), range(max(len(cell.communication), 1)))
    refused: DiagnosticError | None = None
    for first, second in sorted(turns, key=sum):
        compute = cell.compute[first:] + cell.compute[:first]
        communication = cell.communication[second:] + cell.communication[:second]
        try:
            cell_program(cell.kind, shape, shape, CellCosts(()), PlanOrder(compute, communication, source, span))
        except DiagnosticError as error:
            refused = refused or error
        else:
            return CellPlan(cell.kind, compute, communication)
    assert refused is not None
    raise refused


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    cells = [
        {"cell": " & ".join(cell.kind), "compute": list(cell.compute), "comm": list(cell.communication)}
        for cell in plan.cells
    ]
    return {"cells": cells}


ROWS = (Directive("cell", _read, _write, several=True, check_schedule=_check_schedule, resolve=_resolve, facts=_facts),)
