"""Runs commands of another copy of schedc, one after the other in one process, which loads it once."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

_SERVER = """
import json, sys, traceback
from click.testing import CliRunner
from schedc.cli import main

for line in sys.stdin:
    result = CliRunner().invoke(main, json.loads(line))
    unforeseen = result.exc_info is not None and not isinstance(result.exception, SystemExit | None)
    fault = "".join(traceback.format_exception(*result.exc_info)) if unforeseen else ""
    print(json.dumps([result.exit_code, result.output + fault]), flush=True)
"""


class CommandServer:
    """A process of an interpreter that answers commands in a folder. ``run`` gives exit status and output."""

    def __init__(self, python: str | Path, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [python, "-c", _SERVER], cwd=folder, env=dict(environment or os.environ), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        status, output = json.loads(self._process.stdout.readline())
        return int(status), str(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
