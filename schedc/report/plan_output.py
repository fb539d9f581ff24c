"""Writes what a search for plans found into a folder: plan and cost files, its JSON, the plot and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedc.cell.recorded_rows import write_recording
from schedc.drawing.html_plans import draw_plans
from schedc.drawing.pareto import draw_pareto
from schedc.planner.price.copies import RECORD
from schedc.planner.price.priced import PricedPlan
from schedc.report.job_files import JOB_SUFFIXES
from schedc.report.jobs import job_text
from schedc.report.plan_folder import PAGE, PARETO, PLAN_SUFFIX, PLANS_JSON, plan_file, write_folder
from schedc.report.plan_pictures import pareto_plot, plans_page
from schedc.report.plan_timelines import costs_of_plan, timeline_svg


def write_plans(
    folder: Path, forced: bool, facts: Mapping[str, Any], plans: Sequence[PricedPlan], jobs: str = ""
) -> None:
    """Writes the folder whole or not at all. facts: the JSON of the search, whose ``plans`` are these.

    jobs: the kind of jobs beside the plans; empty for none.

    Raises `DiagnosticError` (S750) for a folder that is not to be written over.
    """

    def fill(new: Path) -> None:
        pictures = {}
        copies = [plan.planned.copies for plan in plans if plan.planned.copies is not None]
        if copies and copies[0].record.by_expert is not None:
            write_recording(new / RECORD, copies[0].record.by_expert)
        for place, plan in enumerate(plans, 1):
            path = new / plan_file(place)
            path.write_text(plan.plan_text, encoding="utf-8")
            costs_of_plan(path).write_text(plan.cost_text, encoding="utf-8")
            pictures[path.name] = timeline_svg(path)
            number = path.name.removesuffix(PLAN_SUFFIX)
            if jobs and (job := job_text(jobs, plan, number, facts["plans"][place - 1]["runs_on"])) is not None:
                path.with_name(number + JOB_SUFFIXES[jobs]).write_text(job, encoding="utf-8")
        (new / PLANS_JSON).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        if facts["plans"] or facts["pareto"]:
            (new / PARETO).write_text(draw_pareto(pareto_plot(facts)), encoding="utf-8")
        (new / PAGE).write_text(draw_plans(plans_page(facts, pictures)), encoding="utf-8")

    write_folder(folder, forced, fill)
