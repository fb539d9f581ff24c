"""Proves order and rules on a simulated device, and prices queues of messages, without a GPU.

    python benchmarks/device.py faults | clean | rules | kernels | communicators | capture | launches [--json]

faults   16 faults in the order of streams are planted in the runtime, one at a time. A watched step must find 14 as it
         is and two under ``strict``, and name their lanes and files.
clean    two watched steps of eight schedules under eight plans. Nothing may be found, and every lane that a plan uses
         must have run works.
rules    steps under the rules of a device: the bits of a CPU, or of the serial reference under the same rules. Faults
         that a CPU does not show: a rule must find each.
kernels  every Triton kernel compiled for three architectures, beside a table of registers and loads; its numbers in
         Triton's interpreter beside its twin's; planted faults. `device_kernels.py` starts the processes.
communicators
         steps of 13 schedules at 8 ranks whose messages queue, under each assignment of communicators; deadlocks of
         receives that are posted early. `communicators.py` has the table and the cases.
capture  steps of four schedules with padded and bounded routes, dense, and with a head in chunks. A graph must be
         able to hold these, and no step with exact routes. Trainings whose steps are graphs (on a CPU: tapes) must have
         the bits of trainings without. `device_capture.py` has the cases.
launches operations of a MoE layer, and of its block per microbatch and rank, against their bars: `device_launches.py`.

Printed: `cases`, `failed`, what failed, and seconds. The exit status is 1 if a case failed. The tests run some of these
cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from communicators import steps
from device_capture import capture
from device_kernels import kernels
from device_launches import launches
from device_rules import rules
from figures import table

from support.device_faults import FAULTS, wrong
from support.simulated_cases import PLANS, SCHEDULES, unclean

Judged = tuple[int, list[str], list[dict[str, Any]]]
"""The number of cases, what failed, and rows of figures."""


def faults() -> Judged:
    """The number of planted faults, and what is wrong with those that are not found as they should be."""
    return len(FAULTS), wrong(), []


def clean() -> Judged:
    """The number of schedules times plans, and what was found in them."""
    return len(SCHEDULES) * len(PLANS), [text for pair in product(SCHEDULES, PLANS) for text in unclean(*pair)], []


WORDS: dict[str, Callable[[], Judged]] = {
    "faults": faults,
    "clean": clean,
    "rules": rules,
    "kernels": kernels,
    "communicators": steps,
    "capture": capture,
    "launches": launches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", choices=sorted(WORDS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    cases, failures, rows = WORDS[args.word]()
    figures: dict[str, Any] = {"cases": cases, "failed": len(failures), "seconds": round(time.perf_counter() - start)}
    if args.json:
        print(json.dumps(figures | {"failures": failures} | ({"rows": rows} if rows else {})))
    else:
        print(f"{args.word}: {cases} cases, {len(failures)} failed, {figures['seconds']} s", *failures, sep="\n")
        print(*(table(rows) if rows else ()), sep="\n", end="\n" * bool(rows))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
