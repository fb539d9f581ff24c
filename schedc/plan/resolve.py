"""A plan attached to one schedule at one size: its choices made, its recomputation per stage, its findings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from schedc.cell import PlanOrder, cell_program, stage_shape
from schedc.cell.costs import CellCosts
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.layout.parts import Layout
from schedc.plan.checks import experts_have_layers, padded_pairs, unused_orders
from schedc.plan.directives import Directives, RecomputeRequest
from schedc.plan.row_counts import chosen_method
from schedc.plan.values import Attachments, CellPlan, Level, Method, Recompute

_SCOPES = ("all", "chunk", "stage")
"""The more special one is taken where two lines speak of a stage."""


def resolve(found: Directives, schedule: Schedule, layout: Layout) -> Attachments:
    """The plan with its method chosen, its orders begun where they can run, and its recomputation per stage.

    found: of a checked plan. Raises `DiagnosticError` (S145, S147 to S149, S323) at the place in the plan.
    """
    findings = [
        *experts_have_layers(found, layout),
        *padded_pairs(found, schedule, layout),
        *unused_orders(found, schedule),
        *_misplaced(found, schedule.placement),
    ]
    findings = findings or list(_worked_out(found, schedule))
    if findings:
        raise DiagnosticError(findings)
    choice = chosen_method(found.plan)
    found.give(
        cells=tuple(_started(found, cell) for cell in found.plan.cells),
        method=Method(choice.method) if choice else found.plan.method,
        recompute=per_stage(found.requests, schedule.stages, schedule.placement),
    )
    return found.plan


def _stages_of(request: RecomputeRequest, stages: int, placement: Placement | None) -> list[int]:
    """The stages that a `recompute` line speaks of."""
    if request.scope == "all":
        return list(range(stages))
    if request.scope == "stage" or placement is None:
        return list(request.numbers)
    held = placement.stage_of_chunk[:, list(request.numbers)]
    return sorted({int(stage) for stage in np.unique(held) if stage >= 0})


def _misplaced(found: Directives, placement: Placement) -> Iterator[Diagnostic]:
    """S149: lines of recomputation about what there is not, or that say two things of a stage."""
    said: dict[tuple[str, int], RecomputeRequest] = {}
    for request in found.requests:
        limit = {"chunk": placement.chunks, "stage": placement.stages}.get(request.scope, 0)
        label = Label(request.span)
        if outside := [number for number in request.numbers if number >= limit]:
            message = f"there is no {request.scope} {outside[0]}"
            help = f"the schedule has {placement.stages} stages at these sizes, {placement.chunks} chunks on a rank"
            yield Diagnostic("S149", message, label, help=help, source=found.tree.source)
            continue
        stages = _stages_of(request, placement.stages, placement)
        twice = [said[request.scope, stage] for stage in stages if (request.scope, stage) in said]
        if twice:
            message = f"two levels for the same {request.scope if request.scope != 'all' else 'stages'}"
            help = "keep one; a line for a stage goes before one for a chunk, and that before one for all"
            yield Diagnostic(
                "S149", message, label, (Label(twice[0].span, "the other"),), help=help, source=found.tree.source
            )
        said |= {(request.scope, stage): request for stage in stages}


def _worked_out(found: Directives, schedule: Schedule) -> Iterator[Diagnostic]:
    """S149: level none of a stage that the schedule has Rs of."""
    again = np.flatnonzero(schedule.kind == OpKind.R)
    levels = per_stage(found.requests, schedule.stages, schedule.placement)
    for request in found.requests if again.size else ():
        stages = _stages_of(request, schedule.stages, schedule.placement)
        none = [s for s in stages if levels[s] == request.recompute and request.recompute.level is Level.NONE]
        rows = again[np.isin(schedule.stage[again], none)]
        if rows.size:
            yield Diagnostic(
                "S149",
                f"stage {schedule.stage[rows[0]]} recomputes nothing, and the schedule has Rs of it",
                Label(request.span),
                notes=(f"the first is {schedule.describe(int(rows[0]))}, and there would be nothing for it to do",),
                help="say a level that lets go of something, or nothing of this stage: its Rs then do all of it again",
                source=found.tree.source,
            )


def per_stage(
    requests: list[RecomputeRequest], stages: int, placement: Placement | None = None
) -> tuple[Recompute, ...]:
    """[stages] what is recomputed; empty where nothing is said. Lines about chunks need the placement."""
    levels = [Recompute()] * stages
    for request in sorted(requests, key=lambda request: _SCOPES.index(request.scope)):
        for stage in _stages_of(request, stages, placement):
            levels[stage] = request.recompute
    return tuple(levels) if requests else ()


def _started(found: Directives, cell: CellPlan) -> CellPlan:
    """The order with each lane begun where it can run, tried on a MoE layer of standard segments.

    A lane goes round, layer after layer: where it is begun in the text says nothing. Raises `DiagnosticError` (S323)
    with the line for an order that cannot run wherever it is begun.
    """
    shared = bool(found.plan.experts and found.plan.experts.shared)
    shape = stage_shape(["moe"], shared=shared, hot=found.plan.hot is not None)
    source, span = found.tree.source, found.span(f"cell {cell.kind}")
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
