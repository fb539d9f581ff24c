"""The command line: ``schedc compile | check | show | export | list | explain | run``.

Results go to stdout, diagnostics and progress to stderr. Everything that costs import time is imported by the
command that needs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from schedc import __version__

if TYPE_CHECKING:
    from schedc.cost.costs import Costs
    from schedc.diagnostics import Diagnostic

OK, FINDINGS, USAGE, INTERNAL = 0, 1, 2, 4

F = TypeVar("F", bound=Callable[..., Any])

EPILOG = "Exit codes: 0 ok, 1 findings about the schedule, 2 usage, 4 a fault of schedc itself."


class _Group(click.Group):
    """Turns findings into exit code 1 and our own faults into exit code 4."""

    def invoke(self, ctx: click.Context) -> Any:
        from schedc.diagnostics import DiagnosticError

        try:
            return super().invoke(ctx)
        except DiagnosticError as error:
            _print_findings(error.diagnostics)
            ctx.exit(FINDINGS)
        except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
            raise
        except OSError as error:
            raise click.UsageError(f"{error.filename or 'file'}: {error.strerror or error}") from None
        except Exception:
            traceback.print_exc()
            click.echo("schedc: this is a fault of schedc, not of your file; please report the lines above", err=True)
            ctx.exit(INTERNAL)


@click.group(cls=_Group, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="schedc")
def main() -> None:
    """Compile pipeline-parallel training schedules.

    SCHEDULE is the name of a library schedule (`schedc list`) or the path of a .sched file.
    """


def _sizes(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for value in values:
        name, equals, number = value.partition("=")
        if not equals or not name.isidentifier() or not number.lstrip("-").isdecimal() or len(number) > 18:
            raise click.BadParameter(f"{value!r} is not NAME=INTEGER (for example -D P=8)")
        sizes[name] = int(number)
    return sizes


def schedule_arguments(command: F) -> F:
    """SCHEDULE and its sizes."""
    command = click.option(
        "-D",
        "--define",
        "sizes",
        multiple=True,
        metavar="NAME=INTEGER",
        callback=_sizes,
        help="Value of a size parameter; the others take the defaults of the file.",
    )(command)
    return click.argument("schedule")(command)


def cost_arguments(command: F) -> F:
    """Costs, from options and a file; options win."""
    command = click.option(
        "--cost-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Costs as TOML (docs/costs.md); --cost overrides single values.",
    )(command)
    return click.option(
        "--cost",
        "cost_options",
        multiple=True,
        metavar="NAME=NUMBER",
        help="Cost of F, I, W, B, FB (an overlapped pair) or p2p. Defaults: F=I=W=1, B=I+W, FB=F+B, p2p=0.",
    )(command)


@main.command("compile", epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the results; default build/NAME.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def compile_command(
    schedule: str,
    sizes: dict[str, int],
    cost_options: tuple[str, ...],
    cost_file: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Check SCHEDULE and write its program: one instruction stream per rank.

    Writes program.json (what the runtime loads), program.txt (the same, to read), schedule.csv and schedule.svg.
    """
    from schedc.compiler import analyse, report
    from schedc.draw.svg import draw_svg
    from schedc.emit.torch_csv import to_torch_csv
    from schedc.ir.json import program_to_json
    from schedc.ir.text import print_program
    from schedc.passes.insert_communication import insert_communication

    analysis = analyse(schedule, sizes, _costs(cost_options, cost_file))
    program = insert_communication(analysis.schedule, analysis.costs)
    folder = output or Path("build") / analysis.schedule.name
    files = {
        "program.json": program_to_json(program),
        "program.txt": print_program(program),
        "schedule.csv": to_torch_csv(analysis.schedule),
        "schedule.svg": draw_svg(analysis.schedule, analysis.timeline, analysis.memory),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if as_json:
        click.echo(
            json.dumps(
                {
                    **report(analysis),
                    "schema": "schedc.compile",
                    "instructions": len(program),
                    "files": [str(folder / name) for name in files],
                }
            )
        )
    else:
        click.echo(_table(report(analysis)))
        click.echo(f"{len(program)} instructions; wrote " + ", ".join(str(folder / name) for name in files))
    _finish(analysis.diagnostics)


@main.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def check(
    schedule: str, sizes: dict[str, int], cost_options: tuple[str, ...], cost_file: Path | None, as_json: bool
) -> None:
    """Check SCHEDULE at one size: completeness, order, deadlock, bubble, memory, and the claims of its authors."""
    from schedc.compiler import analyse, failed_report, report
    from schedc.diagnostics import DiagnosticError

    costs = _costs(cost_options, cost_file)
    try:
        analysis = analyse(schedule, sizes, costs)
    except DiagnosticError as error:
        if as_json:
            click.echo(json.dumps(failed_report(error.diagnostics)))
        raise
    facts = report(analysis)
    click.echo(json.dumps(facts) if as_json else _table(facts))
    _finish(analysis.diagnostics)


@main.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; default stdout.")
def show(
    schedule: str, sizes: dict[str, int], cost_options: tuple[str, ...], cost_file: Path | None, output: Path | None
) -> None:
    """Draw SCHEDULE as SVG."""
    from schedc.compiler import analyse
    from schedc.draw.svg import draw_svg

    analysis = analyse(schedule, sizes, _costs(cost_options, cost_file))
    _write(draw_svg(analysis.schedule, analysis.timeline, analysis.memory), output)


def _export_csv(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import legal_schedule
    from schedc.emit.torch_csv import to_torch_csv
    from schedc.library import open_schedule

    return to_torch_csv(legal_schedule(open_schedule(schedule), sizes))


def _export_text(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import legal_schedule
    from schedc.ir.text import print_schedule
    from schedc.library import open_schedule

    return print_schedule(legal_schedule(open_schedule(schedule), sizes))


def _export_program(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import compile as compile_schedule
    from schedc.ir.text import print_program

    return print_program(compile_schedule(schedule, **sizes))


def _export_json(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import compile as compile_schedule
    from schedc.ir.json import program_to_json

    return program_to_json(compile_schedule(schedule, **sizes))


EXPORTS: dict[str, Callable[[str, dict[str, int]], str]] = {
    "csv": _export_csv,
    "text": _export_text,
    "program": _export_program,
    "json": _export_json,
}


@main.command(epilog=EPILOG)
@schedule_arguments
@click.option(
    "--to",
    "target",
    type=click.Choice(list(EXPORTS)),
    required=True,
    help="csv: torch's schedule CSV, one line per rank. text: the schedule. program: the instruction "
    "streams. json: the program that the runtime loads.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; default stdout.")
def export(schedule: str, sizes: dict[str, int], target: str, output: Path | None) -> None:
    """Write SCHEDULE in another format."""
    _write(EXPORTS[target](schedule, sizes), output)


@main.command("list", epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def list_command(as_json: bool) -> None:
    """List the schedules of the library."""
    from schedc.library import names, open_schedule

    entries = []
    for name in names():
        tree = open_schedule(name)
        sizes = {parameter.name: parameter.default for parameter in tree.parameters}
        entries.append({"name": name, "title": tree.doc.strip().partition("\n")[0], "sizes": sizes})
    if as_json:
        click.echo(json.dumps({"schema": "schedc.list", "version": 1, "schedules": entries}))
        return
    width = max(len(str(entry["name"])) for entry in entries)
    for entry in entries:
        click.echo(f"{entry['name']:<{width}}  {entry['title']}")


@main.command(epilog=EPILOG)
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Explain a diagnostic code, with a wrong and a right example; without CODE, list them all."""
    from schedc.codes import CODES, FAMILIES
    from schedc.diagnostics import did_you_mean

    if code is None:
        for family, title in FAMILIES.items():
            click.echo(f"{family}  {title}")
            for entry in CODES.values():
                if entry.code.startswith(family):
                    click.echo(f"  {entry.code}  {entry.title}")
        return
    found = CODES.get(code.upper())
    if found is None:
        raise click.UsageError(f"no diagnostic code {code!r}; {did_you_mean(code.upper(), CODES)}")
    click.echo(f"{found.code}: {found.title}\n\n{found.explanation.strip()}")
    for title, example in (("Wrong", found.wrong), ("Right", found.right)):
        if example:
            click.echo(f"\n{title}:\n\n" + "\n".join(f"    {line}" for line in example.strip().split("\n")))


@main.command(epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@schedule_arguments
@cost_arguments
@click.argument("runtime_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--check",
    "parity",
    type=click.Choice(["bitwise", "none"]),
    default="none",
    show_default=True,
    help="Compare loss and gradients with the serial reference.",
)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Training steps.")
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a Chrome trace (opens in Perfetto)."
)
def run(
    schedule: str,
    sizes: dict[str, int],
    cost_options: tuple[str, ...],
    cost_file: Path | None,
    runtime_options: tuple[str, ...],
    parity: str,
    steps: int,
    trace: Path | None,
) -> None:
    """Train a small transformer with SCHEDULE on P local processes (needs schedc[runtime])."""
    import tempfile
    from importlib.util import find_spec

    from schedc.compiler import compile as compile_schedule
    from schedc.ir.json import program_to_json

    if find_spec("torch") is None or find_spec("schedc_runtime") is None:
        raise click.UsageError("running needs the runtime: pip install 'schedc[runtime]'")
    program = compile_schedule(schedule, costs=_costs(cost_options, cost_file), **sizes)
    with tempfile.TemporaryDirectory(prefix="schedc-") as folder:
        path = Path(folder) / "program.json"
        path.write_text(program_to_json(program), encoding="utf-8")
        command = [sys.executable, "-m", "schedc_runtime.run", "--program", str(path), "--steps", str(steps)]
        command += ["--check", parity] if parity != "none" else []
        command += ["--trace", str(trace)] if trace else []
        sys.exit(subprocess.run([*command, *runtime_options], check=False).returncode)


def _costs(options: tuple[str, ...], path: Path | None) -> Costs:
    """The costs that the options and the file give; a wrong option is wrong usage, a wrong file a finding."""
    from schedc.cost.costs import Costs, load_costs
    from schedc.diagnostics import DiagnosticError

    base = load_costs(path) if path else Costs()
    try:
        return Costs.from_options(options, base=base)
    except DiagnosticError as error:
        _print_findings(error.diagnostics)
        sys.exit(USAGE)


def _table(facts: dict[str, Any]) -> str:
    """The report of `check` for people."""
    sizes = ", ".join(f"{name} = {value}" for name, value in facts["sizes"].items())
    lines = [f"{facts['schedule']} ({sizes}): {facts['ops']} ops on {facts['ranks']} ranks, {facts['stages']} stages"]
    lines.append(
        f"makespan {facts['makespan']:g}, bubble ratio {facts['bubble_ratio']:.4f}, "
        f"span bubble ratio {facts['span_bubble_ratio']:.4f}"
    )
    columns = ("busy", "bubble", "span_bubble", "peak_activations", "peak_pending_weight")
    lines.append("rank  " + "  ".join(columns))
    for rank in range(facts["ranks"]):
        lines.append(f"{rank:>4}  " + "  ".join(f"{facts[name][rank]:>{len(name)}g}" for name in columns))
    for claim in facts["expect"]:
        condition = f" when {claim['condition']}" if claim["condition"] else ""
        lines.append(f"expect {claim['claim']}{condition}: {_verdict(claim)}")
    return "\n".join(lines)


def _verdict(claim: dict[str, Any]) -> str:
    """What became of a claim, and whether the costs of this run were among those it was tried at."""
    if claim["holds"] is None:
        return f"not tested: {claim['why']}"
    tried = f"at {claim['tested']} cost vectors" if claim["tested"] > 1 else "at one cost vector"
    aside = f"; not at the given costs: {claim['why']}" if claim["why"] else ""
    return f"{'holds' if claim['holds'] else 'FAILS'} ({tried}{aside})"


def _write(text: str, path: Path | None) -> None:
    if path is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(f"wrote {path}", err=True)


def _print_findings(diagnostics: tuple[Diagnostic, ...]) -> None:
    from schedc.diagnostics import render

    for diagnostic in diagnostics:
        click.echo(render(diagnostic) + "\n", err=True)
    count = len(diagnostics)
    click.echo(f"{count} finding{'s' if count != 1 else ''}; `schedc explain CODE` tells more", err=True)


def _finish(diagnostics: tuple[Diagnostic, ...]) -> None:
    if diagnostics:
        _print_findings(diagnostics)
        sys.exit(FINDINGS)


if __name__ == "__main__":
    main()
