"""Says that an order was kept by `schedc freeze`, and under which costs it was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.compiler import Analysis
from schedc.elaborate.frozen import CELLS_OF, MADE_AT, frozen_path
from schedc.load.library import path_from_here
from schedc.syntax.input import AppliedPlan
from schedc.syntax.tree import ScheduleTree


def frozen_facts(analysis: Analysis) -> dict[str, Any]:
    """The file of a frozen order and its costs, as ``--json`` prints them; empty for any other order."""
    tree = analysis.tree.schedule if isinstance(analysis.tree, AppliedPlan) else analysis.tree
    path = frozen_path(tree, analysis.schedule.sizes) if isinstance(tree, ScheduleTree) else None
    if path is None or not path.is_file():
        return {}
    head = path.read_text(encoding="utf-8").split("\nschedule ")[0].split("\n")
    costs = [line.removeprefix(MADE_AT) for line in head if line.startswith(MADE_AT)]
    costs += [f"the cells of {line.split(maxsplit=3)[-1]}" for line in head if line.startswith(CELLS_OF)]
    return {"frozen": {"file": path_from_here(path.absolute()), "costs": "; ".join(costs) or None}}


def frozen_text(facts: dict[str, Any]) -> Iterator[str]:
    """A line about a frozen order. facts: of `schedc check`."""
    if "frozen" in facts:
        frozen = facts["frozen"]
        yield f"order: frozen in {frozen['file']}, chosen at {frozen['costs'] or 'costs that the file does not say'}"
