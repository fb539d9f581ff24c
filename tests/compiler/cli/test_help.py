"""Help of the command line: summaries fit a terminal, each command has an example that it takes, slips are named."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from schedc.cli import main
from schedc.cli.examples import EXAMPLES
from support.commands import schedc

FILES = (
    "order.csv",
    "rows.csv",
    "trace.json",
    "mine.sched",
    "step.sched",
    "program.json",
    "plans/a.sched",
    "plans/b.sched",
    "train.py",
)
FOLDERS = ("checkpoints", "audit", "plans")


def commands(group: click.Group, context: click.Context, lead: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{lead}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, context, f"{name} ")


NAMED = dict(commands(main, click.Context(main)))


def test_summaries_fit_a_terminal() -> None:
    for arguments in (["--help"], ["plan", "--help"]):
        text = schedc(*arguments).stdout
        assert "Commands:" in text
        assert "..." not in text.partition("Commands:")[2]


def test_every_command_has_an_example_and_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in FOLDERS:
        Path(folder).mkdir()
    for file in FILES:
        Path(file).write_text("", encoding="utf-8")
    assert NAMED.keys() == EXAMPLES.keys()
    for name, example in EXAMPLES.items():
        assert example.split()[: len(name.split())] == name.split()
        assert f"schedc {example}" in schedc(*name.split(), "--help").stdout
        context, command = click.Context(main), main
        arguments = shlex.split(example)
        while isinstance(command, click.Group):
            context = command.make_context("schedc", arguments, parent=context)
            _, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is NAMED[name] or name == "plan"
        command.make_context(name, arguments, parent=context)  # raises a usage error for what it does not take


@pytest.mark.parametrize(("slip", "meant"), [("chek", "check"), ("Compile", "compile"), ("compre", "compare")])
def test_a_slip_in_a_command_names_the_nearest(slip: str, meant: str) -> None:
    result = schedc(slip, "1f1b")
    assert result.exit_code == 2
    assert f"did you mean `{meant}`?" in result.output


@pytest.mark.slow
def test_show_draws_in_a_terminal_and_writes_svg_into_a_pipe() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "schedc", "show", "1f1b"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert piped.stdout.startswith("<svg")
    with subprocess.Popen(command, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
    assert process.returncode == 0
    assert b"<svg" not in shown
    assert b"1f1b (P = 4, M = 8)" in shown


def _read(terminal: int) -> bytes:
    """The next output; none where the other end is closed, which Linux calls an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""
