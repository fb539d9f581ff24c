"""`schedc report`: bubble, memory and messages of a schedule as formulas."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from schedc.cli.common import EPILOG, json_argument, note_plan


@click.command(epilog=EPILOG)
@click.argument("schedule")
@click.option("--latex", "as_latex", is_flag=True, help="Print the formulas as LaTeX.")
@json_argument
def report(schedule: str, as_latex: bool, as_json: bool) -> None:
    """Derive formulas of SCHEDULE: bubble, peak activations, deferred weight gradients and messages.

    They are fitted to exact critical paths at many sizes and verified at sizes and costs that they were not fitted to;
    what fails there is reported as unknown, with the counterexample. Of a plan, those of its schedule.
    """
    from schedc.analysis.formulas.derive import derive
    from schedc.analysis.formulas.report import to_json, to_text
    from schedc.inputs import open_family
    from schedc.plan.report import to_text as plan_text

    tree = open_family(schedule)
    note_plan(schedule)
    with click.progressbar(length=100, label="measuring", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.update(done * 100 // total - bar.pos)

        facts = to_json(derive(tree, progress))
    attached = _attached(schedule)
    if as_json:
        click.echo(json.dumps(facts | ({"plan": attached} if attached else {})))
        return
    click.echo(to_text(facts, as_latex))
    for line in plan_text(attached) if attached else ():
        click.echo(line)


def _attached(name: str) -> dict[str, Any] | None:
    """What a plan attaches, at its sizes; None for anything else."""
    from schedc.compiler import laid_out, legal_schedule
    from schedc.inputs import open_input
    from schedc.library import Plan
    from schedc.plan import plan_of
    from schedc.plan.report import to_json

    tree = open_input(name)
    if not isinstance(tree, Plan) or any(parameter.default is None for parameter in tree.parameters):
        return None
    schedule = legal_schedule(tree, {})
    return to_json(plan_of(schedule), laid_out(tree, schedule)) if schedule.plan else None
