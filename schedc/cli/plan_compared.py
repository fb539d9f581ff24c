"""`schedc plan compare A.sched B.sched`: the waterfalls of two plan files beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import click

from schedc.cli.common import write


def print_comparison(paths: tuple[Path, Path], output: Path | None, force: bool, as_json: bool) -> None:
    """Prints the comparison, or writes it as a page."""
    from schedc.report.plan_files import load_plan_facts
    from schedc.report.waterfalls import to_json, to_text

    if output is not None and output.exists() and not force:
        raise click.UsageError(f"-o {output} is there already; write over it with --force")
    loaded = [load_plan_facts(path) for path in paths]
    first, second = ({**plan, "file": str(path)} for path, (_, plan) in zip(paths, loaded, strict=True))
    facts = to_json(first, second)
    if output is None:
        click.echo(json.dumps(facts) if as_json else "\n".join(to_text(facts)))
        return
    from schedc.drawing.html_plans import draw_plans
    from schedc.report.plan_pictures import comparison_page
    from schedc.report.plan_timelines import timeline_svg

    pictures = {str(path): timeline_svg(path) for path in paths}
    write(draw_plans(comparison_page(loaded[0][0], first, second, pictures)), output)
