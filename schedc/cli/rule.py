"""`schedc tune --rule`: the text of a schedule from its orders at several sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import failures_told

if TYPE_CHECKING:
    from schedc.load.library import Given


def tell_rule(
    first: Given, sizes: Mapping[str, int], further: Sequence[Path], output: Path | None, as_json: bool
) -> None:
    """Print the text that is inferred from the order of ``first`` at its sizes and those of the files ``further``."""
    from schedc.compiler import price
    from schedc.inference.rule import infer_rule
    from schedc.inputs import open_input, open_order
    from schedc.report.rule import annotated, rule_json
    from schedc.step.costs.costs import Costs

    with failures_told("schedc.rule", as_json):
        orders = [price(open_input(first), sizes, Costs()).schedule, *(open_order(path).schedule for path in further)]
        rule = infer_rule(orders, output.stem if output is not None and output.stem.isidentifier() else "rule")
    text = annotated(rule)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
        click.echo(f"wrote {output}", err=True)
    click.echo(
        json.dumps({**rule_json(rule), "file": str(output) if output else None}) if as_json else text, nl=as_json
    )
