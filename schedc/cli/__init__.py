"""The command line: ``schedc compile | check | show | export | list | explain | run | calibrate``, ...

Results go to stdout, diagnostics and progress to stderr. Modules that take long to import are imported by the command
that needs them.
"""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

import click

from schedc import __version__
from schedc.cli.calibrate import calibrate
from schedc.cli.check import check, compile_command
from schedc.cli.common import EPILOG, FINDINGS, INTERNAL, INTERRUPTED, USAGE, WIDEST, print_findings
from schedc.cli.diff import diff
from schedc.cli.export import export, import_command
from schedc.cli.fmt import fmt
from schedc.cli.freeze import freeze
from schedc.cli.layout import layout
from schedc.cli.lookup import explain, list_command
from schedc.cli.lsp import lsp
from schedc.cli.partition import partition
from schedc.cli.report import report
from schedc.cli.run import run
from schedc.cli.show import show
from schedc.cli.tune import tune
from schedc.cli.watch import watch


class _Group(click.Group):
    """Ends every command with the exit status that its `EPILOG` promises."""

    def invoke(self, ctx: click.Context) -> Any:
        from schedc.diagnostics import DiagnosticError, RequestError

        try:
            return super().invoke(ctx)
        except RequestError as error:
            print_findings(error.diagnostics)
            ctx.exit(USAGE)
        except DiagnosticError as error:
            print_findings(error.diagnostics)
            ctx.exit(FINDINGS)
        except click.UsageError as error:
            if hint := _slip(error):
                raise click.UsageError(f"{error.format_message()} {hint}", error.ctx) from None
            raise
        except KeyboardInterrupt:
            # a terminal has written ^C
            click.echo("\ninterrupted" if sys.stderr.isatty() else "interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
            raise
        except OSError as error:
            raise click.UsageError(f"{error.filename or 'file'}: {error.strerror or error}") from None
        except Exception:
            traceback.print_exc()
            click.echo("schedc: this is a fault of schedc, not of your file; please report the lines above", err=True)
            ctx.exit(INTERNAL)


def _slip(error: click.UsageError) -> str:
    """The right spelling, for slips that click reports only as unknown options or arguments; else empty."""
    if isinstance(error, click.NoSuchOption):
        return "(sizes are given as -D P=4)" if re.fullmatch("-[A-Z]", error.option_name) else ""
    if re.search(r"unexpected extra argument.*\(\w+=", error.message):
        return "(sizes are given as -D P=4, and costs as --cost F=2)"
    return ""


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}


@click.group(cls=_Group, epilog=EPILOG, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="schedc")
def main() -> None:
    """Compile pipeline-parallel training schedules.

    SCHEDULE is the name of a library schedule (`schedc list`), the path of a .sched file or of an order (torch's
    schedule CSV, or our text form), or - for standard input. FILE.sched:NAME chooses one of several.
    """


for _command in (
    compile_command,
    check,
    show,
    watch,
    export,
    import_command,
    fmt,
    freeze,
    list_command,
    explain,
    report,
    diff,
    layout,
    tune,
    calibrate,
    partition,
    lsp,
    run,
):
    main.add_command(_command)
