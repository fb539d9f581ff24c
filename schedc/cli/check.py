"""`schedc compile` and `schedc check`: what is true of a schedule, and its program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schedc.cli.common import EPILOG, asked, cost_arguments, finish, json_argument, note_plan, schedule_arguments
from schedc.cli.ranks import rank_table

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
    from schedc.compiler import report
    from schedc.draw.svg import draw_svg
    from schedc.interchange.torch_csv import to_torch_csv
    from schedc.ir.recomputed import has_recomputation
    from schedc.ir.save import FORMS, forms_of
    from schedc.passes.insert_communication import insert_communication

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
                    **report(analysis, "schedc.compile"),
                    "instructions": len(program),
                    "files": [str(folder / name) for name in files],
                }
            )
        )
    else:
        click.echo(_table(report(analysis), ranks == "all"))
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
    from schedc.compiler import report

    if size_range is not None:
        _sweep(schedule, sizes, costs, size_range, as_json)
        return
    analysis = _analysed("schedc.check", schedule, sizes, costs, as_json)
    facts = report(analysis)
    click.echo(json.dumps(facts) if as_json else _table(facts, ranks == "all"))
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
    from schedc.compiler import analyse, failed_report
    from schedc.diagnostics import DiagnosticError

    try:
        return analyse(schedule, sizes, costs)
    except DiagnosticError as error:
        if as_json:
            click.echo(json.dumps(failed_report(error.diagnostics, schema)))
        raise


def _table(facts: dict[str, Any], every_rank: bool) -> str:
    """The report of `check` for people."""
    sizes = ", ".join(f"{name} = {value}" for name, value in facts["sizes"].items())
    lines = [f"{facts['schedule']} ({sizes}): {facts['ops']} ops on {facts['ranks']} ranks, {facts['stages']} stages"]
    if "layers" in facts:
        lines.append(f"{facts['layers']} layers, by stage {' '.join(map(str, facts['layers_per_stage']))}")
        lines.append(f"layout {facts['layout']}")
    if "plan" in facts:
        from schedc.report.plan import to_text

        lines += to_text(facts["plan"])
    lines.append(
        f"makespan {facts['makespan']:g}, bubble ratio {facts['bubble_ratio']:.4f}, "
        f"span bubble ratio {facts['span_bubble_ratio']:.4f}"
    )
    if "recomputation" in facts:
        lines += _recomputation(facts["recomputation"])
    lines += rank_table(facts, every_rank)
    if "cells" in facts:
        from schedc.plan.price_cells import cells_text

        lines += cells_text(facts["cells"])
    for claim in facts["expect"]:
        condition = f" when {claim['condition']}" if claim["condition"] else ""
        lines.append(f"expect {claim['claim']}{condition}: {_verdict(claim)}")
    return "\n".join(lines)


def _recomputation(facts: dict[str, Any]) -> Iterator[str]:
    if "placed" in facts:
        yield f"recompute in bubbles: {facts['placed']} R placed; makespan {facts['makespan_without']:g} without them"
    yield f"recomputation {facts['ratio']:.4f} of the ranks' time, in ops of its own (R)"


def _verdict(claim: dict[str, Any]) -> str:
    """What became of a claim, and why it says nothing of the costs of this run, where it does not."""
    aside = f" (not the given ones: {claim['aside']})" if claim["aside"] and claim["status"] != "vacuous" else ""
    return _VERDICTS[claim["status"]](claim) + aside


def _failure(claim: dict[str, Any]) -> str:
    example = claim["counterexample"]
    costs = " ".join(f"{symbol}={value:.10g}" for symbol, value in example["costs"].items())
    on_rank = "" if example["rank"] is None else f" on rank {example['rank']}"
    where = (costs or "this size") + on_rank
    if example["left"] is None:
        return f"FAILS: {where}"
    return f"FAILS: {where} gives {example['left']:.10g}, claimed {example['comparison']} {example['right']:.10g}"


def _trial(claim: dict[str, Any]) -> str:
    return f"held at {claim['tested']} cost vectors; {claim['why']}" if claim["tested"] else claim["why"]


_VERDICTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "proved": lambda claim: "proved for all costs at this size",
    "order": lambda claim: "proved for the order of these costs (a policy)",
    "vacuous": lambda claim: str(claim["why"]),
    "refuted": _failure,
    "tried": _trial,
}
