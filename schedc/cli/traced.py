"""The files of `schedc show --trace`: the trace of a run, and the costs that the run wrote beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from schedc.drawing.chart import Chart
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs


def charts_of_trace(
    name: Given, sizes: Mapping[str, int], costs: Costs, cost_origin: str, trace: Path
) -> tuple[Chart, Chart]:
    """The charts of a run, measured and predicted, with times in milliseconds; see `schedc.report.charts.run_charts`.

    cost_origin: where the costs are from; empty for the default costs. Then the file of costs beside the trace
    predicts the times.
    Raises `DiagnosticError`: S610 for a trace of another schedule, S611 for a file that is no trace. Raises
    `click.UsageError` where no costs are known.
    """
    from schedc.inputs import load_text
    from schedc.interchange.run_trace import read_run
    from schedc.report.charts import run_charts

    run = read_run(load_text(trace).text, str(trace))
    beside = trace.with_suffix(".costs.toml")
    if not cost_origin and not beside.is_file():
        raise click.UsageError(f"--trace needs --cost-file or --cost, in milliseconds ({beside} is not there)")
    measured, predicted = run_charts(run, name, sizes, costs, None if cost_origin else beside)
    return (
        replace(measured, said="measured", origin=(("trace", trace.name),)),
        replace(predicted, said="predicted", origin=(("costs", f"{cost_origin or beside.name}, in ms"),)),
    )
