"""Measures a commit against an older one: the benchmarks of both take turns, and medians are compared.

    python benchmarks/against.py OLD [--json] [--only NAME ...] [--runs N]

OLD is a commit of this repository. It is checked out into a folder for the time of the run. Every benchmark of OLD runs
its own code there, with the same Python. Old and new take turns, and who begins changes with every turn.

Instrument: what each benchmark prints; for `cold_check` the processor time of a new process.

Printed for each figure: the median of OLD, the median of this commit, and new over old, where more than 1 is worse.
The exit status is 1 where a ratio is above its limit. A figure that OLD does not measure has no ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Figure(NamedTuple):
    """One figure of a benchmark.

    command: arguments of Python. read: the figure, of the JSON that the command prints; None: processor time of the
    command. rate: whether more is better. runs: of each commit. limit: new over old.
    """

    command: str
    read: Callable[[Any], float] | None
    rate: bool = False
    runs: int = 5
    limit: float = 1.03


FIGURES = {
    "ops_per_second_per_core": Figure(
        "benchmarks/timeline.py --json --simulations 300000", itemgetter("ops_per_second_per_core"), True, 15
    ),
    "ms_per_claim": Figure("benchmarks/claims.py --json --ranks 2 --microbatches 2", itemgetter("ms_per_claim")),
    "million_simulations_s": Figure(
        "benchmarks/planner.py --json --only simulations --simulations 200000", itemgetter("million_simulations_s")
    ),
    "bound.legal_plans_per_s": Figure(
        "benchmarks/planner.py --json --only bound", lambda facts: float(facts["bound"]["legal_plans_per_s"]), True
    ),
    "price_ms": Figure("benchmarks/planner.py --json --only price", lambda facts: float(facts["price"]["ms"])),
    "overhead_us": Figure("benchmarks/executor.py --json --repetitions 8", itemgetter("overhead_us")),
    "compile_s": Figure(
        "benchmarks/compile.py --json --largest 32", lambda facts: sum(row["schedc_s"] for row in facts["rows"])
    ),
    "cold_check": Figure("-m schedc check 1f1b", None, runs=15, limit=1.0),
}


def run(figure: Figure, checkout: Path) -> float | None:
    """The figure as a checkout gives it; None where it does not measure it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPATH": f"{checkout}:{checkout / 'runtime'}", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *figure.command.split()]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode == 2:  # an option that OLD does not have
        return None
    if done.returncode:
        raise SystemExit(f"{checkout}: {figure.command} failed\n{done.stderr[-2000:]}")
    if figure.read is None:
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(figure.read(json.loads(done.stdout)))


def compared(figure: Figure, old: Path, runs: int) -> dict[str, float | int | None]:
    """Medians of both commits, and new over old. The first turn warms both up and does not count."""
    values: dict[Path, list[float]] = {old: [], ROOT: []}
    for turn in range(runs + 1):
        for checkout in (old, ROOT) if turn % 2 else (ROOT, old):
            value = run(figure, checkout)
            if turn and value is not None:
                values[checkout].append(value)
    before, after = (statistics.median(each) if each else None for each in values.values())
    ratio = None if not before or not after else (before / after if figure.rate else after / before)
    return {"old": before, "new": after, "new_over_old": ratio, "limit": figure.limit, "runs": runs}


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "old"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def main() -> int:
    """Print the comparison; 1 where a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="a commit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=tuple(FIGURES), default=tuple(FIGURES))
    parser.add_argument("--runs", type=int, help="runs of each commit, in place of each figure's own number")
    arguments = parser.parse_args()
    rows = {}
    with checked_out(arguments.old) as old:
        for name in arguments.only:
            row = rows[name] = compared(FIGURES[name], old, arguments.runs or FIGURES[name].runs)
            if not arguments.json:
                cells = ("-" if value is None else f"{value:.4g}" for value in list(row.values())[:3])
                print(f"{name:<26} {'  '.join(f'{cell:>10}' for cell in cells)}   at most {row['limit']}", flush=True)
    if arguments.json:
        print(json.dumps({"old": arguments.old, "figures": rows}))
    return int(any(row["new_over_old"] and row["new_over_old"] > row["limit"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
