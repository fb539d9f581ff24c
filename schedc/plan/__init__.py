"""What a plan attaches to a schedule: experts, exchanges, overlap, recomputation; read, checked, written, reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedc.ir.plan import (
    Balance,
    By,
    Capacity,
    CellPlan,
    Drop,
    ExpertSizes,
    Hot,
    Level,
    Method,
    Migrate,
    Plan,
    Recompute,
    Topology,
)

if TYPE_CHECKING:
    from schedc.ir.program import Program
    from schedc.ir.schedule import Schedule

Attachments = Plan
"""The name of a plan in scripts written before it was called `Plan`."""

__all__ = [
    "Attachments",
    "Balance",
    "By",
    "Capacity",
    "CellPlan",
    "Drop",
    "ExpertSizes",
    "Hot",
    "Level",
    "Method",
    "Migrate",
    "Plan",
    "Recompute",
    "Topology",
    "plan_of",
]


def plan_of(value: Program | Schedule) -> Plan:
    """What the plan of a program or schedule attaches; nothing where it has none."""
    return value.plan
