"""Timelines of plan files, priced by the cost files that lie beside them, and their pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from schedc.compiler import Priced, price
from schedc.draw.svg import picture
from schedc.inputs import open_input
from schedc.plan.price_cells import price_order
from schedc.report.plan_folder import COSTS_SUFFIX
from schedc.step.costs.costs import load_costs
from schedc.step.memory import Memory, RankBytes
from schedc.step.timeline import Timeline

_WIDTH = 1320.0
"""px of a timeline on a page."""


def costs_of(plan: Path) -> Path:
    """The cost file of a plan file: ``01.costs.toml`` beside ``01.sched``."""
    return plan.with_name(plan.stem + COSTS_SUFFIX)


def priced_file(plan: Path) -> tuple[Priced, Timeline]:
    """A plan file under its costs, and its timeline in seconds: with a table [cell], that from inside cells.

    Raises `DiagnosticError` for files that do not compile.
    """
    step = price(open_input(str(plan)), {}, load_costs(costs_of(plan)))
    return step, step.timeline() if step.costs.cell is None else price_order(step.dependencies, step.costs)


def timeline_svg(plan: Path) -> str:
    """The picture of a plan's order, in seconds and GB. Raises `DiagnosticError` for files that do not compile."""
    step, timeline = priced_file(plan)
    memory, title = _in_gigabytes(step.memory()), f"{plan.name}: {step.schedule.name}, in seconds and GB"
    return picture(step.schedule, timeline, memory, step.works, title=title, width=_WIDTH).text


def _in_gigabytes(memory: Memory) -> Memory:
    scaled = replace(memory, memory=memory.memory / 1e9, memory_inside=memory.memory_inside / 1e9)
    held = memory.held
    if held is None:
        return scaled
    return replace(scaled, held=RankBytes(held.peak / 1e9, None if held.inside is None else held.inside / 1e9))
