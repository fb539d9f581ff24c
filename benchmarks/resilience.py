"""What a run survives, and who is named: one word for each promise.

    python benchmarks/resilience.py WORD [--json]

flips    bits of a committed checkpoint flip, files are cut, swapped or lost: each must be found in its file and
         piece, and the step before must be taken. `support.damaged_checkpoints` has the cases.
full     the disk is full at 20 places of a save, or read-only: the save fails by its error, the step before stays
         as it is, and the next save works. `support.full_disks` makes such a disk.
hostile  altered checkpoints of every form: no code in them runs, no file outside of them is opened, and only errors of
         ours come out. `support.hostile_checkpoints` has the cases.

Printed: `cases`, `failed`, the word's own figures, what failed, and seconds of processor time. The exit status is 1 if
a case failed. The tests run some of these cases.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

Judged = tuple[int, list[str], dict[str, Any]]
"""The number of cases, what failed, and further figures by name."""

WORDS = {
    "flips": "support.damaged_checkpoints:flips",
    "full": "support.full_disks:full",
    "hostile": "support.hostile_checkpoints:hostile",
}
"""By word: the file, and the function without arguments that returns `Judged`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", choices=sorted(WORDS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    module, _, name = WORDS[args.word].partition(":")
    judge: Callable[[], Judged] = getattr(import_module(module), name)
    start = sum(os.times()[:4])
    cases, failures, figures = judge()
    figures = {"cases": cases, "failed": len(failures), **figures, "seconds": round(sum(os.times()[:4]) - start, 1)}
    if args.json:
        print(json.dumps(figures | {"failures": failures[:50]}))
    else:
        print(f"{args.word}: {', '.join(f'{name} {value}' for name, value in figures.items())}", *failures, sep="\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
