"""What happens inside a cell: graphs of segments and exchanges, and programs that overlap them. No torch here."""

from __future__ import annotations

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import Lane, Node, StageShape
from schedc.cell.program import Action, CellProgram, CellStep, Half, PlanOrder
from schedc.cell.schedule import cell_program
from schedc.cell.standard_blocks import stage_shape

__all__ = [
    "Action",
    "CellCosts",
    "CellProgram",
    "CellStep",
    "Half",
    "Lane",
    "Node",
    "PlanOrder",
    "SegmentTimes",
    "StageShape",
    "cell_program",
    "stage_shape",
]
