"""Measures how long `schedc compile` of a library schedule takes from a cold start to its files.

    python benchmarks/cold_start.py [--json] [--schedule dualpipev] [--runs 11]

Every run is a new process, on one core where the system can pin processes. Python's byte code lies in a folder of its
own, which one run fills that does not count: installed packages have their byte code, too.

Instrument: processor time of the process, which other load on the machine does not lengthen, and wall clock.

Printed: medians over the runs, of the whole command, of its imports alone (the modules that `compile` loads), and of a
process that only starts Python.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from figures import give, parser_of

MODULES = (
    "schedc.cli",
    "schedc.compiler",
    "schedc.drawing.svg",
    "schedc.interchange.torch_csv",
    "schedc.ir.json",
    "schedc.ir.text",
)


class ColdStart(NamedTuple):
    """Seconds of one process."""

    cpu: float
    wall: float


def run(arguments: list[str], environment: dict[str, str]) -> ColdStart:
    """Runs a new process of this Python to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ColdStart(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def measure(schedule: str, runs: int, folder: Path) -> dict[str, float]:
    """Median seconds of the whole command, of its imports and of an empty program, taken in turn."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    written = folder / "written"
    programs = {
        "compile": ["-m", "schedc", "compile", schedule, "-o", str(written)],
        "import": ["-c", f"import {', '.join(MODULES)}"],
        "python": ["-c", "pass"],
    }
    starts: dict[str, list[ColdStart]] = {name: [] for name in programs}
    for turn in range(runs + 1):
        for name, arguments in programs.items():
            for file in written.glob("*"):
                file.unlink()
            start = run(arguments, environment)
            if name == "compile" and len(list(written.iterdir())) != 4:
                raise SystemExit("the files were not written")
            if turn:  # the first turn fills the byte code
                starts[name].append(start)
    return {
        f"{name}_{part}": statistics.median(getattr(start, column) for start in runs_of_program)
        for name, runs_of_program in starts.items()
        for part, column in (("s", "cpu"), ("wall_s", "wall"))
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--schedule", default="dualpipev")
    parser.add_argument("--runs", type=int, default=11)
    arguments = parser.parse_args()
    pinned = hasattr(os, "sched_setaffinity")
    if pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments.schedule, arguments.runs, Path(folder))
    instrument = "CPU time of a new process, median; *_wall_s is wall clock"
    facts = {"instrument": instrument, "schedule": arguments.schedule, "runs": arguments.runs, "one_core": pinned}
    give({**facts, **figures}, arguments)


if __name__ == "__main__":
    main()
