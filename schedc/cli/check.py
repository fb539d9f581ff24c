"""`schedc compile` and `schedc check`: what is true of a schedule, and its program."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, asked, cost_arguments, finish, json_argument, note_plan, schedule_arguments

if TYPE_CHECKING:
    from schedc.claims.check import Status
    from schedc.compiler import Analysis
    from schedc.cost.costs import Costs
    from schedc.load.library import Given

_ranks_argument = click.option(
    "--ranks",
    type=click.Choice(["some", "all"]),
    default="some",
    show_default=True,
    help="Of more than 32 ranks, print the first, the last, the extremes and equal neighbours together, or print all.",
)


@click.command("compile", epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the results; default build/NAME.",
)
@click.option(
    "--format",
    "forms",
    type=click.Choice(["json", "text", "npz"]),
    multiple=True,
    help="Form of the program, may be repeated: program.json, program.txt (to read), or program.npz (compressed "
    "columns, which numpy opens). Default: json and text, above 100,000 instructions npz.",
)
@_ranks_argument
@json_argument
def compile_command(
    schedule: Given,
    sizes: dict[str, int],
    costs: Costs,
    output: Path | None,
    forms: tuple[str, ...],
    ranks: str,
    as_json: bool,
) -> None:
    """Check SCHEDULE and write its program: one instruction stream per rank.

    Writes the program in one or more forms, each of which the runtime loads, schedule.svg, and schedule.csv where torch
    has all ops of the schedule. Files of these names from an earlier compile into the same folder are replaced or
    removed.
    """
    from schedc.draw.svg import draw_svg
    from schedc.interchange.torch_csv import to_torch_csv
    from schedc.ir.recomputed import has_recomputation
    from schedc.ir.save import FORMS, forms_of
    from schedc.passes.insert_communication import insert_communication
    from schedc.report.check import to_json, to_text

    analysis = _analysed("schedc.compile", schedule, sizes, costs, as_json)
    program = insert_communication(analysis.schedule, analysis.costs, analysis.dependencies)
    recomputes = has_recomputation(analysis.schedule)
    folder = output or Path("build") / analysis.schedule.name
    written = [FORMS[name] for name in FORMS if name in (forms or forms_of(program))]
    files = {
        **{form.file: form.content(program) for form in written},
        **({} if recomputes else {"schedule.csv": to_torch_csv(analysis.schedule).encode()}),
        "schedule.svg": draw_svg(analysis.schedule, analysis.timeline, analysis.memory).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*(form.file for form in FORMS.values()), "schedule.csv"} - files.keys():
        (folder / name).unlink(missing_ok=True)  # of another program: what lies together belongs together
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if as_json:
        click.echo(
            json.dumps(
                {
                    **to_json(analysis, "schedc.compile"),
                    "instructions": len(program),
                    "files": [str(folder / name) for name in files],
                }
            )
        )
    else:
        click.echo(to_text(to_json(analysis), ranks == "all"))
        without = "; no schedule.csv: torch's has no op R" if recomputes else ""
        click.echo(f"{len(program)} instructions; wrote {', '.join(str(folder / name) for name in files)}{without}")
    finish(analysis.diagnostics)


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option(
    "--sweep",
    "size_range",
    metavar="RANGE",
    help="Check every legal size of a range instead, such as 'P<=16, M<=4*P', in parallel; tells the smallest failing.",
)
@_ranks_argument
@json_argument
def check(
    schedule: Given, sizes: dict[str, int], costs: Costs, size_range: str | None, ranks: str, as_json: bool
) -> None:
    """Check SCHEDULE at one size: completeness, order, deadlock, bubble, memory, and the claims of its authors."""
    from schedc.report.check import to_json, to_text

    if size_range is not None:
        _sweep(schedule, sizes, costs, size_range, as_json)
        return
    analysis = _analysed("schedc.check", schedule, sizes, costs, as_json)
    facts = to_json(analysis)
    click.echo(json.dumps(facts) if as_json else to_text(facts, ranks == "all"))
    finish(analysis.diagnostics)


def _sweep(name: Given, sizes: dict[str, int], costs: Costs, size_range: str, as_json: bool) -> None:
    from schedc.claims.size_range import sizes_in
    from schedc.claims.sweep import sweep
    from schedc.inputs import open_family

    tree = open_family(name)
    note_plan(name)
    with asked():
        listed = list(sizes_in(size_range, tree, sizes))
    label = f"checking {len(listed)} sizes"
    with click.progressbar(length=len(listed), label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        result = sweep(tree, listed, costs, bar.update)
    found = result.smallest
    if as_json:
        facts = {"schema": "schedc.sweep", "version": 1, "schedule": tree.name, "range": size_range}
        click.echo(json.dumps({**facts, **result.to_json()}))
    else:
        click.echo(f"{tree.name}: {result.tried} sizes checked, {result.refused} refused, {result.failed} failed")
        for text, counts in result.claims:
            click.echo(f"expect {text}: {_counted(counts)}")
        if found:
            smallest = ", ".join(f"{key} = {value}" for key, value in found.sizes.items())
            click.echo(f"the smallest size that fails: {smallest}")
    finish(found.diagnostics if found else ())


_COUNTED: dict[Status, str] = {
    "proved": "proved for all costs at",
    "order": "proved for the order of these costs (a policy) at",
    "tried": "not decidable, and held where it was tried, at",
    "refuted": "FAILS at",
    "vacuous": "no costs satisfy its condition at",
}


def _counted(counts: Mapping[Status, int]) -> str:
    """How often a claim had each status, over the sizes of a sweep."""
    total = sum(counts.values())
    some = [(words, counts[status]) for status, words in _COUNTED.items() if counts[status]]
    if len(some) == 1 and total > 1:
        return f"{some[0][0]} all {total} sizes"
    return ", ".join(f"{words} {count} size{'s' * (count > 1)}" for words, count in some) or "checked at no size"


def _analysed(schema: str, schedule: Given, sizes: dict[str, int], costs: Costs, as_json: bool) -> Analysis:
    """The analysis; findings that prevent it are told as JSON too where JSON was asked for."""
    from schedc.compiler import analyse
    from schedc.diagnostics import DiagnosticError
    from schedc.report.check import failed_json

    try:
        return analyse(schedule, sizes, costs)
    except DiagnosticError as error:
        if as_json:
            click.echo(json.dumps(failed_json(error.diagnostics, schema)))
        raise
