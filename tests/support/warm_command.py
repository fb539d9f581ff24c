"""Runs `schedc` as a process of its own that need not load torch: it is forked from a server that has done so."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

from schedc.__main__ import main
from schedc_runtime.testing import PRELOADED


def run_schedc(
    arguments: Sequence[str],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    *,
    joined: bool = False,
) -> CompletedProcess[str]:
    """Exit status and output of ``schedc ARGUMENTS`` in a folder. joined: errors stand among the output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "output" if joined else "errors")
        where = str(folder or Path.cwd())
        process = context.Process(
            target=_main, args=(tuple(arguments), where, dict(environment or os.environ), str(output), str(errors))
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.terminate()  # the command ends its ranks
            process.join()
            raise TimeoutExpired(["schedc", *arguments], timeout, output.read_text(), errors.read_text())
        return CompletedProcess(
            ["schedc", *arguments], process.exitcode, output.read_text(), "" if joined else errors.read_text()
        )


def _main(arguments: Sequence[str], folder: str, environment: Mapping[str, str], output: str, errors: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in (output, 1), (errors, 2):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = ["schedc", *arguments]
    main()
