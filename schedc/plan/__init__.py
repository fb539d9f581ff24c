"""What a plan attaches to a schedule: experts, exchanges, overlap, recomputation; read, checked, written, reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedc.attachments.values import (
    Attachments,
    By,
    Capacity,
    CellPlan,
    Drop,
    ExpertSizes,
    Hot,
    Level,
    Method,
    Recompute,
)
from schedc.step.costs.exchange import Topology

if TYPE_CHECKING:
    from schedc.ir.program import Program
    from schedc.ir.schedule import Schedule

__all__ = [
    "Attachments",
    "By",
    "Capacity",
    "CellPlan",
    "Drop",
    "ExpertSizes",
    "Hot",
    "Level",
    "Method",
    "Recompute",
    "Topology",
    "plan_of",
]


def plan_of(value: Program | Schedule) -> Attachments:
    """What the plan of a program or schedule attaches; nothing where it has none.

    Raises `DiagnosticError` for a text that no plan has.
    """
    from schedc.plan.writer import read_plan

    return read_plan(value.plan, value.placement.stages)
