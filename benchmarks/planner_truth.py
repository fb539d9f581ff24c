"""Compares the planner with facts from elsewhere, and with itself. Each word is a comparison, in a file of `truth/`.

    python benchmarks/planner_truth.py families --json
    python benchmarks/planner_truth.py networks --json
    python benchmarks/planner_truth.py intervals --json [--cases FILES]
    python benchmarks/planner_truth.py prices --json [--cases 500] [--seed 0] [--jobs 2]
    python benchmarks/planner_truth.py rows --json [--cases FILES]
    python benchmarks/planner_truth.py monotone --json [--cases 20000] [--seed 0] [--jobs 2]

Each word prints `cases`, `failed`, the names of what failed, and figures. Exit status 1: a case failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from truth.cases import Options, Verdict
from truth.families import families
from truth.intervals import intervals
from truth.monotone import monotone
from truth.networks import networks
from truth.prices import prices
from truth.rows import rows

WORDS: dict[str, Callable[[Options], Verdict]] = {
    "families": families,
    "networks": networks,
    "intervals": intervals,
    "prices": prices,
    "rows": rows,
    "monotone": monotone,
}


def main() -> int:
    """Run one word; exit with 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cases", type=int, default=0, help="of words that draw; default their own number")
    parser.add_argument("--seed", type=int, default=0, help="of words that draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes of words that draw")
    asked = parser.parse_args()
    verdict = WORDS[asked.word](Options(asked.cases, asked.seed, asked.jobs))
    facts = {"cases": verdict.cases, "failed": len(verdict.failed), "names": verdict.failed, "figures": verdict.figures}
    if asked.json:
        print(json.dumps(facts, indent=1))
    else:
        for name, figures in verdict.figures.items():
            print(f"{'FAILED' if name in verdict.failed else '      '} {name}: {figures}")
        print("\n".join(f"FAILED {name}" for name in verdict.failed if name not in verdict.figures))
        print(f"{verdict.cases} cases, {len(verdict.failed)} failed")
    return 1 if verdict.failed else 0


if __name__ == "__main__":
    sys.exit(main())
