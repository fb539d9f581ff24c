"""`schedc report`: formulas of a schedule's bubble, memory and messages, and the communication that its cells hide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from schedc.cli.common import EPILOG, json_argument, note_plan, progress_bar, schedule_arguments
from schedc.cli.cost_words import cost_arguments
from schedc.units import equations

if TYPE_CHECKING:
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=1),
    help="Seconds after which times that are not decided yet are left out, and named; default: no limit.",
)
@click.option("--latex", "as_latex", is_flag=True, help="Print the formulas as LaTeX, and nothing else.")
@json_argument
def report_command(
    schedule: Given, sizes: dict[str, int], costs: Costs, seconds: float | None, as_latex: bool, as_json: bool
) -> None:
    """Derive formulas of bubble, peaks and messages of SCHEDULE.

    Formulas are fitted to all linear pieces of the times at many sizes, and decided for all costs at these sizes and at
    others. Each is printed with the sizes at which it is proved. A formula that fails is printed with the
    counterexample. For a plan, the formulas are those of its schedule.

    Formulas hold for all sizes and costs. With a cost file that has a table [cell], the report also has the
    exposed and the hidden communication at one size. Both are given per kind of cell and for the step.

    The floors are those of `schedc check --floor` at one size, under the costs: what no order undercuts.
    """
    from schedc.diagnostics import RequestError
    from schedc.elaborate.sizes import unknown_sizes
    from schedc.formulas.derive import derive
    from schedc.inputs import open_family
    from schedc.report.formulas import to_json, to_text

    if costs.microbatches and (as_latex or costs.cell is None):
        raise click.UsageError("the costs give `microbatches`, and formulas speak of microbatches of equal cost")
    tree = open_family(schedule)
    note_plan(schedule)
    if unknown := unknown_sizes(tree, sizes):
        raise RequestError(unknown)
    cells = {} if as_latex else _cells(schedule, sizes, costs)
    floor = {} if as_latex else _floor(schedule, sizes, costs)
    with progress_bar(100, "measuring") as bar:

        def progress(done: int, total: int) -> None:
            bar.update(done * 100 // total - bar.pos)

        facts = to_json(derive(tree, progress, seconds=seconds))
    attached = _attached(schedule)
    if as_json:
        click.echo(json.dumps(facts | ({"plan": attached} if attached else {}) | cells | floor))
        return
    click.echo(to_text(facts, as_latex))
    for line in _further(attached, floor, cells, bool(costs.microbatches)):
        click.echo(line)


def _further(
    attached: dict[str, Any] | None, floor: dict[str, Any], cells: dict[str, Any], factors: bool
) -> Iterator[str]:
    """The lines below the formulas. factors: whether the costs give factors of microbatches."""
    if attached:
        from schedc.report.plan import to_text as plan_text

        yield from plan_text(attached)
    if floor:
        from schedc.report.floors import ranks_text

        yield from ranks_text(floor["floor"])
    if cells:
        from schedc.report.cells import to_text as cells_text

        size = equations(cells["cells"]["sizes"])
        yield f"at {size}{', with the factors of microbatches that the costs give' * factors}:"
        yield from cells_text(cells["cells"])


def _cells(name: Given, sizes: dict[str, int], costs: Costs) -> dict[str, Any]:
    """The facts of the cells at one size, under the key ``cells``; empty if the costs have no table [cell]."""
    if costs.cell is None:
        return {}
    from schedc.report.cells import to_json as cells_json
    from schedc.report.charts import cell_pricing_at

    schedule, pricing = cell_pricing_at(name, sizes, costs)
    return {"cells": {"sizes": dict(schedule.sizes), **cells_json(pricing)}}


def _floor(name: Given, sizes: dict[str, int], costs: Costs) -> dict[str, Any]:
    """The key ``floor``: the floors at one size. Without floors, ``none`` gives the reason."""
    from schedc.compiler import analyse
    from schedc.diagnostics import DiagnosticError
    from schedc.inputs import open_input
    from schedc.report.floors import of_analysis
    from schedc.syntax.input import AppliedPlan

    if costs.cell is not None or isinstance(open_input(name), AppliedPlan):
        return {"floor": {"none": "floors speak of ops that take the times of costs, without a plan and cells"}}
    try:
        analysis = analyse(name, sizes, costs)
        return {"floor": {"sizes": dict(analysis.schedule.sizes), **of_analysis(analysis)}}
    except DiagnosticError as error:
        return {"floor": {"none": error.diagnostics[0].message}}


def _attached(name: Given) -> dict[str, Any] | None:
    """The facts of a plan at its default sizes; None for a schedule, or for sizes without defaults."""
    from schedc.compiler import legal_schedule
    from schedc.inputs import open_input
    from schedc.ir.plan import NO_PLAN
    from schedc.plan.apply import layout_of_plan
    from schedc.report.plan import to_json
    from schedc.syntax.input import AppliedPlan

    tree = open_input(name)
    if not isinstance(tree, AppliedPlan) or any(parameter.default is None for parameter in tree.parameters):
        return None
    schedule = legal_schedule(tree, {})
    return to_json(schedule.plan, layout_of_plan(tree.tree, schedule), schedule) if schedule.plan != NO_PLAN else None
