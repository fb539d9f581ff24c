"""The command line: ``schedc compile | check | show | export | list | explain | run | calibrate``, ...

Results go to stdout, diagnostics and progress to stderr. The file of a command is imported when the command is run.
Modules that take long to import are imported by the function that needs them.
"""

from __future__ import annotations

import re
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from schedc import __version__
from schedc.cli.common import EPILOG, FINDINGS, INTERNAL, INTERRUPTED, USAGE, WIDEST, print_findings
from schedc.cli.examples import EXAMPLES
from schedc.cli.failures import WrongUsage, keep_words, print_failure
from schedc.cli.screen import options_of_all

COMMANDS = {
    **{name: name for name in ("calibrate", "check", "checkpoint", "compare", "diagnose", "diff", "doctor")},
    **{
        name: name
        for name in (
            "export",
            "fit",
            "fmt",
            "freeze",
            "frontier",
            "layout",
            "lock",
            "lsp",
            "partition",
            "plan",
            "prove",
        )
    },
    **{name: name for name in ("providers", "report", "run", "show", "torchrun", "tune", "watch")},
    "compile": "check",
    "explain": "lookup",
    "import": "export",
    "list": "lookup",
    "schema": "lookup",
}
"""By its name, the file of this folder that has a command as ``NAME_command``: loaded when the command is run."""


class _Group(click.Group):
    """Loads the commands of `COMMANDS`, and ends every one with the exit status that its `EPILOG` promises."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"schedc.cli.{COMMANDS[cmd_name]}"), f"{cmd_name}_command")
        return with_example(command, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from schedc.diagnostics import did_you_mean

            raise click.UsageError(f"No such command {args[0]!r}; {did_you_mean(args[0], COMMANDS)}".rstrip("; "), ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        keep_words(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise WrongUsage(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        from schedc.diagnostics import DiagnosticError, RequestError

        try:
            return super().invoke(ctx)
        except RequestError as error:
            print_failure(ctx, USAGE, found=error.diagnostics)
            print_findings(error.diagnostics)
            ctx.exit(USAGE)
        except DiagnosticError as error:
            print_failure(ctx, FINDINGS, found=error.diagnostics)
            print_findings(error.diagnostics)
            ctx.exit(FINDINGS)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            wrong = WrongUsage(error, _slip(error))
            print_failure(ctx, USAGE, wrong.message)
            raise wrong from None
        except KeyboardInterrupt:
            # a terminal has written ^C
            click.echo("\ninterrupted" if sys.stderr.isatty() else "interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.exceptions.Exit, click.ClickException, click.Abort, BrokenPipeError):
            raise
        except OSError as error:
            wrong = WrongUsage(click.UsageError(f"{error.filename or 'file'}: {error.strerror or error}"))
            print_failure(ctx, USAGE, wrong.message)
            raise wrong from None
        except Exception:
            print_failure(ctx, INTERNAL)
            traceback.print_exc()
            click.echo("schedc: this is a fault of schedc, not of your file; please report the lines above", err=True)
            ctx.exit(INTERNAL)


def with_example(command: click.Command, name: str) -> click.Command:
    """The command, and the commands of a group, with an example in front of the exit statuses of their help."""
    if command.params[-1:] == [] or command.params[-1].name != "color":
        command.params += options_of_all()
    command.epilog = f"\b\nExample:\n  schedc {EXAMPLES[name]}\n\n{EPILOG}"
    if isinstance(command, click.Group):
        for own, each in command.commands.items():
            with_example(each, f"{name} {own}")
    return command


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
@click.pass_context
def main(ctx: click.Context) -> None:
    """Compile pipeline-parallel training schedules.

    SCHEDULE is the name of a library schedule (`schedc list`), a .sched file, an order (torch's
    schedule CSV, or our text form), or - for standard input. FILE.sched:NAME chooses one of several.
    """
    from schedc.cli.defaults import defaults_for

    name = ctx.invoked_subcommand or ""
    command = _Group.get_command(ctx.command, ctx, name) if isinstance(ctx.command, _Group) else None
    if command is not None:
        inner = command.commands if isinstance(command, click.Group) else {}
        own = {each: defaults_for(one, (name, each), Path.cwd(), COMMANDS) for each, one in inner.items()}
        ctx.default_map = {name: own or defaults_for(command, (name,), Path.cwd(), COMMANDS)}
