"""Timelines of plan files, priced by the cost files that lie beside them, and their pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from schedc.drawing.facts import INSIDE
from schedc.drawing.svg import picture
from schedc.inputs import open_input
from schedc.plan.passes import Step, lower
from schedc.plan.travelling import travelling_copies
from schedc.report.plan_folder import COSTS_SUFFIX
from schedc.step.costs.costs import load_costs
from schedc.step.memory import Memory, RankBytes

_WIDTH = 1320.0
"""px of a timeline on a page."""


def costs_of_plan(plan: Path) -> Path:
    """The cost file of a plan file: ``01.costs.toml`` beside ``01.sched``."""
    return plan.with_name(plan.stem + COSTS_SUFFIX)


def priced_file(plan: Path) -> Step:
    """A plan file under its costs in seconds: predicted, with its memory.

    Raises `DiagnosticError` for files that do not compile.
    """
    return lower(Step(open_input(str(plan)), {}, load_costs(costs_of_plan(plan))), "predicted", "memory")


def timeline_svg(plan: Path) -> str:
    """The picture of a plan's order, in seconds and GB. Raises `DiagnosticError` for files that do not compile."""
    step = priced_file(plan)
    memory, title = _in_gigabytes(step.memory), f"{plan.name}: {step.schedule.name}, in seconds and GB"
    copies = travelling_copies(step)
    origin = (INSIDE if copies else ("costs", f"of {costs_of_plan(plan).name}"),)
    facts = step.schedule, step.predicted, memory, step.works
    return picture(*facts, copies=copies, origin=origin, title=title, width=_WIDTH).text


def _in_gigabytes(memory: Memory) -> Memory:
    scaled = replace(memory, memory=memory.memory / 1e9, memory_inside=memory.memory_inside / 1e9)
    held = memory.held
    if held is None:
        return scaled
    return replace(scaled, held=RankBytes(held.peak / 1e9, None if held.inside is None else held.inside / 1e9))
