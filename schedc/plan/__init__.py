"""What a plan attaches to a schedule: experts, exchanges, overlap, recomputation; read, checked, written, reported."""

from schedc.plan.values import (
    By,
    Capacity,
    CellPlan,
    Drop,
    ExpertPlan,
    Experts,
    Hot,
    Level,
    Method,
    Recompute,
    Topology,
)

__all__ = [
    "By",
    "Capacity",
    "CellPlan",
    "Drop",
    "ExpertPlan",
    "Experts",
    "Hot",
    "Level",
    "Method",
    "Recompute",
    "Topology",
]
