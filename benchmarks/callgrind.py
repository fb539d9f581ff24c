"""Counts the processor's instructions of calls by valgrind's callgrind: a measure that other load does not change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def counts_of(arguments: Sequence[str], names: Sequence[str], timeout: float = 3600.0) -> dict[str, int]:
    """Instructions of each call that a program counts by `count`. names: of the calls, in order.

    arguments: of the interpreter. Only what `count` runs is slow: the program is loaded without instrumentation.
    """
    if shutil.which("valgrind") is None:
        raise SystemExit("counting instructions needs the program valgrind")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts"
        options = "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={file}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = ["valgrind", "-q", *options, sys.executable, *arguments]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        if run.returncode:
            raise SystemExit(f"the program failed under valgrind:\n{run.stderr[-2000:]}")
        return {name: _total(Path(f"{file}.{number}")) for number, name in enumerate(names, 1)}


def count(works: Sequence[Callable[[], None]]) -> None:
    """Run works in order, twice uncounted and then counted. Only under `counts_of`."""
    for work in works:
        work()
    control = subprocess.Popen(["callgrind_control", "-i", "on", str(os.getpid())], stdout=subprocess.DEVNULL)
    while control.poll() is None:
        pass  # valgrind takes the command between instructions of this process
    for work in works:  # valgrind translates their code
        work()
    for work in works:
        torch._C._valgrind_toggle()
        work()
        torch._C._valgrind_toggle_and_dump_stats()


def _total(file: Path) -> int:
    found = re.search(r"^summary: (\d+)", file.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"callgrind wrote no counts to {file.name}")
    return int(found[1])
