"""`schedc tune --rule`: the text of a schedule from its orders at several sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from schedc.cli.common import failures_told
from schedc.cli.screen import write_note

if TYPE_CHECKING:
    from schedc.load.library import Given


SECONDS = 300.0
"""Time to try texts in, where `--time` says none."""
_OF_SEARCH = frozenset(
    ("cost_options", "cost_file", "memory", "objective", "split", "pairs", "work", "workers", "random_seed")
)
"""Parameters of `schedc tune` that only a search reads."""


def tell_rule(
    first: Given,
    sizes: Mapping[str, int],
    further: Sequence[Path],
    seconds: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Print the text that is inferred from the order of ``first`` at its sizes and those of the files ``further``.

    seconds: time to try texts in; None for `SECONDS`.
    """
    from schedc.compiler import price
    from schedc.inference.rule import infer_rule
    from schedc.inputs import open_input, open_order
    from schedc.report.rule import annotated, rule_json
    from schedc.step.costs.costs import Costs

    _refuse_options_of_search()
    with failures_told("schedc.rule", as_json):
        orders = [price(open_input(first), sizes, Costs()).schedule, *(open_order(path).schedule for path in further)]
        name = output.stem if output is not None and output.stem.isidentifier() else "rule"
        rule = infer_rule(orders, name, seconds=seconds or SECONDS)
    text = annotated(rule)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
        write_note(f"wrote {output}")
    click.echo(
        json.dumps({**rule_json(rule), "file": str(output) if output else None}) if as_json else text, nl=as_json
    )


def _refuse_options_of_search() -> None:
    """Refuses what only a search reads."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _OF_SEARCH and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = parameter.opts[0]
            raise click.UsageError(f"--rule works at unit costs and searches nothing: {option} has no effect beside it")
