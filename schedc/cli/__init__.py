"""The command line: ``schedc compile | check | show | export | list | explain | run | calibrate``, ...

Results go to stdout, diagnostics and progress to stderr. Everything that costs import time is imported by the
command that needs it.
"""

from __future__ import annotations

import traceback
from typing import Any

import click

from schedc import __version__
from schedc.cli.calibrate import calibrate
from schedc.cli.check import check, compile_command
from schedc.cli.common import EPILOG, FINDINGS, INTERNAL, USAGE, print_findings
from schedc.cli.diff import diff
from schedc.cli.export import export, import_command
from schedc.cli.fmt import fmt
from schedc.cli.freeze import freeze
from schedc.cli.layout import layout
from schedc.cli.lookup import explain, list_command
from schedc.cli.lsp import lsp
from schedc.cli.report import report
from schedc.cli.run import run
from schedc.cli.show import show
from schedc.cli.tune import tune
from schedc.cli.watch import watch

_NO_SUCH_SCHEDULE = {"S121", "S122"}


class _Group(click.Group):
    """Turns findings into exit code 1, a schedule that is not there into 2, our own faults into 4."""

    def invoke(self, ctx: click.Context) -> Any:
        from schedc.diagnostics import DiagnosticError

        try:
            return super().invoke(ctx)
        except DiagnosticError as error:
            print_findings(error.diagnostics)
            ctx.exit(USAGE if {d.code for d in error.diagnostics} <= _NO_SUCH_SCHEDULE else FINDINGS)
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

    SCHEDULE is the name of a library schedule (`schedc list`), or the path of a .sched file or of an order (torch's
    schedule CSV, or our text form).
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
    lsp,
    run,
):
    main.add_command(_command)
