"""`schedc fit`: constants of the planner's cost model from measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import click

from schedc.cli.common import EPILOG, json_argument, need
from schedc.cli.spellings import renamed


@click.command(epilog=EPILOG)
@click.argument("rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@renamed("--called", "--only", metavar="NAME", help="Fit only rows with this name in the column `called`.")
@click.option(
    "--cv",
    "cross_validate",
    is_flag=True,
    help="Fit again without each of 5 parts of the rows, three times, and without each model; show the errors there.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the fit; by default ROWS with the ending .fit.toml, beside it.",
)
@json_argument
def fit_command(rows: Path, called: str | None, cross_validate: bool, output: Path | None, as_json: bool) -> None:
    """Fit the constants of the cost model to measured steps.

    ROWS is a CSV file with one training run per row: sizes of the model, groups of devices, schedule, and seconds per
    step. docs/guide/fitting.md has the columns. The constants are the most likely ones under priors that are printed
    beside them. `schedc plan predict` uses the fit.
    """
    from schedc.planner.fit.fitted import fit_text
    from schedc.planner.fit.fitting import fit_rows
    from schedc.planner.fit.rows import load_rows
    from schedc.report.fit import fit_to_json, fit_to_text

    measured = load_rows(rows)
    if called:
        measured = measured.only(called)
    need("the fit needs scipy", "plan", "scipy")
    result = fit_rows(measured, rows.stem, cross_validate)
    path = output or rows.with_suffix(".fit.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fit_text(result.fit), encoding="utf-8")
    facts = fit_to_json(result) | {"file": str(path)}
    click.echo(json.dumps(facts) if as_json else f"{fit_to_text(result)}\n\nwrote {path}")
