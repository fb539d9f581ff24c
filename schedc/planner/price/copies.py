"""Copies of experts in a plan: the line for them, and the record of the routing by which they are priced."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedc.cell.recorded_rows import RecordedRows
from schedc.cell.rows import CellRows
from schedc.ir.plan import Balance, Plan
from schedc.plan.choose_balance import WAYS
from schedc.plan.writer import write_plan
from schedc.step.costs.costs import Costs

RECORD = "routing.npz"
"""The record among the files of plans, which their cost files name."""

LINES = {way.name: write_plan(way.applied(Plan(), Balance("auto"))) for way in WAYS}
"""The line of each way to copy experts, by its name."""

COPYING = frozenset(line.partition(" ")[0] for line in LINES.values() if line)
"""The words of these lines."""


@dataclass(frozen=True, eq=False)
class PlannedCopies:
    """How a plan copies experts. way: a name of `LINES`. record: of the routing, by expert."""

    way: str
    record: RecordedRows

    @property
    def line(self) -> str:
        """The line of the plan file; "" without copies."""
        return LINES[self.way]

    def priced_by(self, costs: Costs) -> Costs:
        """Costs with a table of cells, and the rows of the record."""
        assert costs.cell is not None
        return replace(costs, cell=replace(costs.cell, rows=CellRows(recorded=self.record)))


def no_copies(tp: int, cp: int) -> str:
    """Why a plan of so many tensor and context ranks has no copies of experts; "" where it may have some."""
    kinds = {"tensor": tp, "context": cp}
    return next((f"a pipeline with {kind} ranks copies no experts" for kind, ranks in kinds.items() if ranks > 1), "")
