"""Fits the rows of a table of cells, ``[cell.rows]``, to a schedule and its plan: layers, microbatches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from schedc.cell.graph import StageShape
from schedc.cell.issue_order import ExpertRanks
from schedc.cell.table import CellTable
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.cells.group_pricing import RankRows, layers_of
from schedc.step.costs.checks import problem


def group_of(
    schedule: Schedule, table: CellTable, shapes: Sequence[StageShape], plan: Plan, source: Source | None
) -> RankRows | None:
    """The ranks of an expert group with their rows; None where the table does not give rows.

    Raises `DiagnosticError` (S404) for rows of another number of ranks, layers or microbatches.
    """
    if table.rows is None:
        return None
    topology, ranks = plan.topology, table.rows.ranks
    key = "per_rank" if table.rows.recorded is None else "recorded"
    findings: list[Diagnostic] = []
    if ranks is not None and topology is not None and ranks != topology.nodes * topology.per_node:
        message = f"`{key}` has the rows of {ranks} ranks, the plan's topology {topology.nodes} x {topology.per_node}"
        findings.append(problem("S404", message, source, key, help="give the rows of every rank of the expert group"))
    if table.rows.recorded is not None:
        layers, microbatches, _ = table.rows.recorded.shape
        has = sum(map(layers_of, shapes)), schedule.microbatches
        if (layers, microbatches) != has:
            message = (
                f"`recorded` has {layers} layers and {microbatches} microbatches, the schedule has "
                f"{has[0]} layers with experts and {has[1]} microbatches"
            )
            help = "record a run of this model at these sizes"
            findings.append(problem("S404", message, source, key, help=help))
    if findings:
        raise DiagnosticError(findings)
    members = None if ranks is None or topology is None else ExpertRanks(topology.nodes, topology.per_node)
    return RankRows(table.rows.factors, shapes, members)
