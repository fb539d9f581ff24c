"""`schedc compile` and `schedc check`: analyse a schedule, and write its program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import (
    EPILOG,
    asked,
    failures_told,
    finish,
    json_argument,
    note_plan,
    progress_bar,
    replicas_argument,
    schedule_arguments,
    sizes_argument,
    slices_argument,
)
from schedc.cli.cost_words import cost_arguments, cost_origin, note_policy
from schedc.cli.job import KINDS
from schedc.cli.many import FOREIGN, files_arguments, print_foreign
from schedc.cli.recorded import record_argument
from schedc.cli.snapshot import snapshot_arguments

if TYPE_CHECKING:
    from schedc.cli.snapshot import GivenSnapshot
    from schedc.compiler import Analysis
    from schedc.ir.arrays import Floats
    from schedc.ir.program import Program
    from schedc.load.library import Given
    from schedc.source import Source
    from schedc.step.costs.costs import Costs

_ranks_argument = click.option(
    "--ranks",
    type=click.Choice(["some", "all"]),
    default="some",
    show_default=True,
    help="Ranks to print. some: above 32, the first, the last and the extremes, with equal neighbours together.",
)


@click.command("compile", epilog=EPILOG)
@schedule_arguments
@slices_argument
@cost_arguments
@record_argument
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
@click.option(
    "--job", type=click.Choice(KINDS), help="Write a job that trains by the program: for Slurm, SkyPilot or Kubeflow."
)
@replicas_argument
@_ranks_argument
@json_argument
def compile_command(
    schedule: Given,
    sizes: dict[str, int],
    costs: Costs,
    output: Path | None,
    forms: tuple[str, ...],
    job: str | None,
    replicas: int | None,
    ranks: str,
    as_json: bool,
) -> None:
    """Check SCHEDULE and write its program.

    A program has one instruction stream per rank.

    Writes the program in one or more forms, each of which the runtime loads; schedule.svg; and schedule.csv if torch
    has all ops of the schedule. Files of these names from an earlier compile into the same folder are replaced or
    removed. With --replicas the program has the works of replicas at their places; without, the runtime puts them in.
    """
    from schedc.interchange.refusals import foreign_op
    from schedc.report.check import to_json, to_text

    analysis = _analysed("schedc.compile", schedule, sizes, costs, as_json, replicas)
    program, folder = analysis.program(), output or Path("build") / analysis.schedule.name
    files = _write_files(analysis, program, forms, folder)
    files += _write_job(job, analysis, program, replicas or 1, folder) if job else []
    if as_json:
        facts = {**to_json(analysis, "schedc.compile"), "instructions": len(program), "files": files}
        click.echo(json.dumps(facts))
    else:
        click.echo(to_text(to_json(analysis), ranks == "all"))
        foreign = foreign_op(analysis.schedule)
        without = f"; no schedule.csv: torch's has no {foreign}" if foreign else ""
        without = without or "; no schedule.csv: torch's has no works beside compute" * bool(len(program.works))
        click.echo(f"{len(program)} instructions; wrote {', '.join(files)}{without}")
    finish(analysis.diagnostics)


def _write_files(analysis: Analysis, program: Program, forms: tuple[str, ...], folder: Path) -> list[str]:
    """Writes program, drawing and CSV into a folder, without files of an earlier program; returns their paths."""
    from schedc.drawing.facts import origin_of
    from schedc.drawing.svg import draw_svg
    from schedc.interchange.refusals import foreign_op
    from schedc.interchange.torch_csv import to_torch_csv
    from schedc.ir.save import FORMS, forms_of
    from schedc.plan.travelling import travelling_copies

    schedule, copies = analysis.schedule, travelling_copies(analysis)
    timeline, origin = analysis.timeline if copies is None else copies.timeline, origin_of(analysis.costs, bool(copies))
    lacks = bool(foreign_op(schedule)) or len(program.works) > 0
    written = [FORMS[name] for name in FORMS if name in (forms or forms_of(program))]
    files = {
        **{form.file: form.content(program) for form in written},
        **({} if lacks else {"schedule.csv": to_torch_csv(schedule).encode()}),
        "schedule.svg": draw_svg(
            schedule, timeline, analysis.memory, analysis.works, copies=copies, origin=origin
        ).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*(form.file for form in FORMS.values()), "schedule.csv"} - files.keys():
        (folder / name).unlink(missing_ok=True)  # a file of another program
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in files]


def _write_job(kind: str, analysis: Analysis, program: Program, replicas: int, folder: Path) -> list[str]:
    """Writes the job beside the program, and returns its path."""
    from schedc.ir.save import FORMS, form_of
    from schedc.report.compiled_job import FILE, ProgramHosts, compiled_job
    from schedc.report.job_files import JOB_SUFFIXES

    hosts = ProgramHosts.of(program, analysis.schedule.plan, replicas)
    if isinstance(hosts, str):
        raise click.UsageError(f"no job: {hosts}")
    written = [form.file for form in (form_of(program), *FORMS.values()) if (folder / form.file).exists()]
    path = folder / f"{FILE}{JOB_SUFFIXES[kind]}"
    path.write_text(compiled_job(kind, analysis.schedule.name, hosts, written[0]), encoding="utf-8")
    return [str(path)]


@click.command(epilog=EPILOG)
@files_arguments
@sizes_argument
@slices_argument
@cost_arguments
@record_argument
@click.option(
    "--sweep",
    "size_range",
    metavar="RANGE",
    help="Check every legal size of a range instead, such as 'P<=16, M<=4*P', in parallel; print the smallest failing.",
)
@replicas_argument
@snapshot_arguments
@click.option(
    "--rows",
    "row_costs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Price a step of these rows too: a text with the cost of a row per line, in any unit. Prints the step in "
    "their order, in the order of a search, and a bound of all orders.",
)
@click.option(
    "--floor",
    is_flag=True,
    help="Print what no order of these ops undercuts within the memory that each rank holds here, and why.",
)
@_ranks_argument
def check_command(
    schedule: Given,
    form: str,
    sizes: dict[str, int],
    costs: Costs,
    size_range: str | None,
    replicas: int | None,
    snapshot: GivenSnapshot | None,
    row_costs: Path | None,
    floor: bool,
    ranks: str,
) -> None:
    """Check SCHEDULE at one size: order, bubble, memory, claims.

    A finding says where an order is incomplete or deadlocks, and which claim of the authors fails. All
    schedules and plans of several files, and of the .sched files below a folder, are checked at their default sizes.
    """
    from schedc.report.check import to_json, to_text

    as_json = form == "json"
    if size_range is not None:
        factors = costs.microbatches or None
        one_size: dict[str, object] = {
            "--replicas": replicas,
            "--snapshot": snapshot,
            "--rows": row_costs,
            "microbatches": factors,
        }
        one_size |= {"--floor": floor or None, f"--format {form}": form if form in FOREIGN else None}
        for option, value in one_size.items():
            if value is not None:
                raise click.UsageError(f"{option} is priced at one size, without --sweep")
        _sweep(schedule, sizes, costs, size_range, as_json)
        return
    with failures_told("schedc.check", as_json):
        rows = _rows(row_costs, costs)
    analysis = _analysed("schedc.check", schedule, sizes, costs, as_json, replicas)
    with failures_told("schedc.check", as_json):
        if floor and (analysis.inside is not None or analysis.lines is not None):
            raise click.UsageError("--floor speaks of ops that take the times of costs: give no plan and no cells")
        facts = to_json(analysis, snapshot=snapshot, rows=rows, floor=floor)
    if form in FOREIGN:
        print_foreign(analysis.diagnostics, form)
    else:
        click.echo(json.dumps(facts) if as_json else to_text(facts, ranks == "all"))
    if (origin := cost_origin()) and analysis.tree is not None:
        note_policy(analysis.tree, sizes, origin)
    finish(analysis.diagnostics)


def _rows(path: Path | None, costs: Costs) -> tuple[Source, Floats] | None:
    """The costs of rows of a file, with their text; None without a file."""
    if path is None:
        return None
    if costs.microbatches:
        raise click.UsageError("--rows makes factors of microbatches, and the costs give `microbatches`")
    from schedc.step.costs.row_costs import load_row_costs

    return load_row_costs(path)


def _sweep(name: Given, sizes: dict[str, int], costs: Costs, size_range: str, as_json: bool) -> None:
    from schedc.claims.size_range import sizes_in
    from schedc.claims.sweep import sweep
    from schedc.inputs import open_family
    from schedc.plan.order import order_pricer
    from schedc.report.sweep import to_json, to_text

    tree = open_family(name)
    note_plan(name)
    with asked():
        listed = list(sizes_in(size_range, tree, sizes))
    with progress_bar(len(listed), f"checking {len(listed)} sizes") as bar:
        result = sweep(tree, listed, costs, bar.update, pricer=order_pricer(costs))
    click.echo(json.dumps(to_json(tree.name, size_range, result)) if as_json else "\n".join(to_text(tree.name, result)))
    finish(result.smallest.diagnostics if result.smallest else ())


def _analysed(
    schema: str, schedule: Given, sizes: dict[str, int], costs: Costs, as_json: bool, replicas: int | None
) -> Analysis:
    """The analysis. With --json, findings that prevent it are printed as JSON, too."""
    from schedc.compiler import analyse
    from schedc.plan.passes import lower

    with failures_told(schema, as_json):
        return lower(analyse(schedule, sizes, costs, replicas), "communicators")
