"""Reports a record of the routing that was taken for other sizes than its own."""

from __future__ import annotations

from typing import Any

from schedc.cell.table import CellTable
from schedc.compiler import Analysis
from schedc.plan.price_cells import with_rows_of


def table_of(analysis: Analysis) -> CellTable | None:
    """The table of cells, with a record taken for the sizes of the schedule; None without a table."""
    return None if analysis.costs.cell is None else with_rows_of(analysis.schedule, analysis.costs.cell)


def to_json(analysis: Analysis) -> dict[str, Any]:
    """The sizes of the record, and those that it was taken for; empty for a record of the sizes, and without any."""
    table = table_of(analysis)
    record = None if table is None or table.rows is None else table.rows.recorded
    if record is None or record.known is None:
        return {}
    return {"record": {"known": record.known._asdict(), "taken": record.of_step._asdict()}}


def to_text(facts: dict[str, Any]) -> str:
    """The line of `to_json`'s facts for people."""
    known, taken = (
        f"{sizes['layers']} layers, {sizes['microbatches']} microbatches and {sizes['ranks']} ranks of "
        f"{sizes['rows']:,} rows"
        for sizes in (facts["known"], facts["taken"])
    )
    return f"record of {known} is taken for {taken}"
