"""`schedc lock`: keeps the figures of schedules in a file, and says in CI which of them changed."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, FINDINGS, asked, sizes_argument, write
from schedc.cli.completion import complete_schedule
from schedc.cli.cost_words import cost_words
from schedc.cli.spellings import renamed

if TYPE_CHECKING:
    from schedc.report.locked import Locked


@click.command(epilog=EPILOG)
@click.argument("schedules", nargs=-1, metavar="[SCHEDULE]...", shell_complete=complete_schedule)
@sizes_argument
@cost_words
@renamed("--diff", "--check", is_flag=True, help="Write nothing; show the changes, and exit with 1 if there are any.")
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default="schedc.lock",
    show_default=True,
    help="The file with the figures.",
)
def lock_command(
    schedules: tuple[str, ...], sizes: dict[str, int], cost_options: tuple[str, ...], diff: bool, path: Path
) -> None:
    """Keep figures of schedules, to see what changes them.

    The file has makespan, bubble, peaks, verdicts on claims, and a digest of the order of each SCHEDULE at these sizes
    and costs. A folder is all its .sched files. A SCHEDULE that is in the file at other sizes or costs stays there.
    Without SCHEDULE all figures of the file are made anew.

    `--diff` makes them anew, too, and compares. Paths are as seen from the current folder.
    """
    from schedc.cli.many import files_of
    from schedc.report.locked import LockedCase, locked_figures, moved_figures, to_toml
    from schedc.step.costs.costs import Costs

    if not schedules and (sizes or cost_options):
        raise click.UsageError("-D and --cost need a SCHEDULE")
    if diff and schedules:
        raise click.UsageError("--diff compares everything in the file: give no schedule")
    kept = _read(path) if path.exists() or not schedules else []
    if diff:
        lines = [line for case, told in kept for line in moved_figures(case, told, locked_figures(case)[1])]
        click.echo("\n".join(lines) or f"{len(kept)} as in {path}")
        sys.exit(FINDINGS if lines else 0)
    with asked():
        Costs.from_options(cost_options)
    cases = [LockedCase(name, sizes, cost_options) for name in files_of(schedules)] or [case for case, _ in kept]
    rows = {case.key: (case, told) for case, told in kept}
    rows |= {case.key: (case, told) for case, told in map(locked_figures, cases)}
    write(to_toml(rows.values()), path)


def _read(path: Path) -> list[Locked]:
    """The cases of the file, which is to be there."""
    from schedc.report.locked import from_toml

    try:
        return from_toml(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise click.UsageError(f"there is no {path}: `schedc lock SCHEDULE` writes it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        raise click.UsageError(f"{path}: {error}") from None
