"""Reads a page as a session: files to save, commands, and the shown output.

A page saves a file by ``Save it as `name` `` and the block of code that follows. A ``console`` block has commands
behind ``$ ``, each followed by its output or by nothing. In an output ``...`` leaves out any text.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from schedc.cli import main
from support.paths import ROOT
from support.warm_command import run_python, run_schedc, run_torchrun

_PART = re.compile(
    r"[Ss]ave\s+(?:it|this)\s+as\s+`(?P<name>[\w.]+)`[^`]*?\n\n```\w+\n(?P<text>.*?)^```$"
    r"|^```console\n(?P<block>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command line, and the output that the page shows; empty where it shows none."""

    line: str
    shown: tuple[str, ...]

    @property
    def starts_processes(self) -> bool:
        return not self.line.startswith("schedc ") or self.line.split()[1] in ("run", "calibrate", "doctor")

    @property
    def status(self) -> int:
        """The exit status that a reader expects: 1 where the output has a finding, or two orders differ."""
        finds = any(re.search(r"error\[|FAILS|the orders part", line) for line in self.shown)
        return int(finds)


def session(page: str) -> list[File | Command]:
    return [part for match in _PART.finditer(page) for part in _parts(match)]


def _parts(match: re.Match[str]) -> Iterator[File | Command]:
    if match["name"]:
        yield File(match["name"], match["text"])
        return
    before, *commands = re.split(r"^\$ ", match["block"], flags=re.MULTILINE)
    assert not before, f"output before the first command: {before}"
    for command in commands:
        line, _, shown = command.partition("\n")
        yield Command(line, tuple(shown.rstrip().splitlines()))


def run(command: Command, folder: Path) -> tuple[int, str]:
    """Exit status and output, in the current folder, which is ``folder``."""
    words = shlex.split(command.line)
    if not command.starts_processes:
        result = CliRunner().invoke(main, words[1:])
        return result.exit_code, result.output.replace(f"{ROOT}/", "")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    warm_command = {"schedc": run_schedc, "torchrun": run_torchrun, "python": run_python}[words[0]]
    done = warm_command(words[1:], folder, environment, 300, joined=True)
    return done.returncode, done.stdout


def shows(shown: tuple[str, ...], output: str) -> bool:
    """Whether the page's lines are the output, with ``...`` for what is left out."""
    printed = "\n".join(line.rstrip() for line in output.rstrip().split("\n")) + "\n"
    wanted = "\n".join(line.rstrip() for line in shown) + "\n"
    any_lines = re.sub(r"^\.\.\.\n", "...", wanted, flags=re.MULTILINE)
    return doctest.OutputChecker().check_output(any_lines, printed, doctest.ELLIPSIS)
