"""The project's own forms as export targets: the schedule's text, the program's text, and the program's JSON."""

from __future__ import annotations

from schedc.ir.json import program_to_json
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.ir.text import print_program, print_schedule
from schedc.plan.price_cells import communicated
from schedc.step.costs.costs import Costs
from schedc.step.program.insert_works import insert_works
from schedc.step.work_runs import WorkRuns


def export_text(schedule: Schedule, _costs: Costs) -> str:
    """The target ``text``."""
    return print_schedule(schedule)


def export_program(schedule: Schedule, costs: Costs, works: WorkRuns | None = None) -> str:
    """The target ``program``."""
    return print_program(_program(schedule, costs, works))


def export_json(schedule: Schedule, costs: Costs, works: WorkRuns | None = None) -> str:
    """The target ``json``."""
    return program_to_json(_program(schedule, costs, works))


def _program(schedule: Schedule, costs: Costs, works: WorkRuns | None) -> Program:
    program, times = communicated(schedule, costs)
    if works is None:
        return program
    duration = None if times is None else times.duration
    return insert_works(program, works.dependencies, works.placed, works.time, costs, duration)
