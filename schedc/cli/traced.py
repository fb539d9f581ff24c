"""What `schedc show --trace` speaks of: a run as it was measured, and as costs predict it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.charts import chart_of

if TYPE_CHECKING:
    from schedc.cost.costs import Costs
    from schedc.draw.chart import Chart
    from schedc.load.library import Given


def run_charts(schedule: Given, sizes: Mapping[str, int], costs: Costs, given: str, trace: Path) -> tuple[Chart, Chart]:
    """The charts of a run, measured and predicted, in milliseconds.

    given: where the costs are from, empty where none were given: then the order is that of the default costs, and
    the prediction that of the costs of stages beside the trace. Sizes that were not given are the trace's.
    Raises `DiagnosticError`: S610 for a trace that does not fit, S611 for what is none; wrong usage without costs.
    """
    from schedc.analysis.dependencies import Dependencies
    from schedc.compiler import priced
    from schedc.cost.costs import load_costs
    from schedc.draw.chart import Chart
    from schedc.inputs import load_text, open_input
    from schedc.interchange.run_trace import measured, read_run

    run = read_run(load_text(trace).text, str(trace))
    beside = trace.with_suffix(".costs.toml")
    if not given and not beside.is_file():
        raise click.UsageError(f"--trace needs --cost-file or --cost, in milliseconds ({beside} is not there)")
    tree = open_input(schedule)
    own = {parameter.name: run.sizes[parameter.name] for parameter in tree.parameters if parameter.name in run.sizes}
    found, of_stages = priced(tree, {**own, **sizes}, costs)
    known = Dependencies.of(found)
    timeline = measured(run, known)
    predicted = chart_of(found, of_stages if given else load_costs(beside), known)
    origin = ("costs", f"{given or beside.name}, in ms")
    return (
        replace(Chart.of_run(found, timeline, predicted.memory), said="measured", origin=(("trace", trace.name),)),
        replace(predicted, said="predicted", origin=(origin,)),
    )
