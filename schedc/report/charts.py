"""Charts and cell prices of schedules by name, compiled and priced at one size, for `show` and `report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from schedc.compiler import price
from schedc.diagnostics import CompilerBug
from schedc.drawing.chart import Chart
from schedc.inputs import open_input
from schedc.interchange.run_trace import MeasuredRun, measured_run
from schedc.ir.schedule import Schedule
from schedc.load.library import Given
from schedc.plan.passes import Step, lower
from schedc.plan.price_cells import price_cells
from schedc.plan.travelling import travelling_copies
from schedc.step.cells.cell_pricing import CellPricing
from schedc.step.costs.costs import Costs, load_costs

_BESIDE_WORKS = "copies of experts are not drawn beside works; `schedc check` prices them"


def chart_at(name: Given, sizes: Mapping[str, int], costs: Costs, replicas: int | None = None) -> Chart:
    """The chart of a schedule at one size. Raises `DiagnosticError` for a schedule that is unknown or not legal.

    replicas: as for `schedc.compiler.price`.
    """
    return chart_of(Step(open_input(name), sizes, costs, replicas))


def charts_at(names: tuple[Given, Given], sizes: Mapping[str, int], costs: tuple[Costs, Costs]) -> tuple[Chart, Chart]:
    """Two charts at the same sizes: the second schedule takes the first's value of every size that both have.

    A size that only the second schedule has goes to it alone. A size that neither has is reported for the first
    schedule (an S1 code).
    """
    trees = [open_input(name) for name in names]
    parameters = [{parameter.name for parameter in tree.parameters} for tree in trees]
    own = {size: value for size, value in sizes.items() if size in parameters[0] or size not in parameters[1]}
    first = chart_of(Step(trees[0], own, costs[0]))
    shared = {**sizes, **first.schedule.sizes}
    common = {parameter.name: shared[parameter.name] for parameter in trees[1].parameters if parameter.name in shared}
    return first, chart_of(Step(trees[1], common, costs[1]))


def chart_of(step: Step) -> Chart:
    """The chart of a step, which may be measured already or not."""
    step = lower(step, "timeline", "memory")
    if (copies := travelling_copies(step)) is not None:
        return Chart.inside(step.schedule, step.memory, step.costs, copies)
    note = _BESIDE_WORKS if step.works and step.costs.cell and step.schedule.plan.copies_experts else ""
    return replace(Chart.of(step.schedule, step.timeline, step.memory, step.costs, step.works), note=note)


def run_charts(
    run: MeasuredRun, name: Given, sizes: Mapping[str, int], costs: Costs, cost_file: Path | None
) -> tuple[Chart, Chart]:
    """The charts of a run, measured and predicted, with times in milliseconds.

    sizes: those that are absent are the run's. costs: decide the order, and predict the times unless there is a
    cost_file, which has the times that the run measured of each stage.
    Raises `DiagnosticError`: S610 for a run of another schedule.
    """
    tree = open_input(name)
    own = {parameter.name: run.sizes[parameter.name] for parameter in tree.parameters if parameter.name in run.sizes}
    step = price(tree, {**own, **sizes}, costs)
    timeline = measured_run(run, step.dependencies)
    predicted = chart_of(step.under(load_costs(cost_file)) if cost_file else step)
    return Chart.of_run(step.schedule, timeline, predicted.memory), predicted


def cell_pricing_at(name: Given, sizes: Mapping[str, int], costs: Costs) -> tuple[Schedule, CellPricing]:
    """A schedule or plan at one size, and the prices of its cells by costs that have a table [cell].

    Raises `DiagnosticError` where there is no such legal schedule, and S404.
    """
    step = price(open_input(name), sizes, costs)
    pricing = price_cells(step.dependencies, step.costs)
    if pricing is None:
        raise CompilerBug("cells", "cells were asked for with costs that know of none")
    return step.schedule, pricing
