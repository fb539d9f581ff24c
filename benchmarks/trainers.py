"""Measures a trainer's day: one command per capability, each prints one JSON object with an entry per case.

python benchmarks/trainers.py NAME [--json]
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module

COMMANDS = {
    "compiled": "trainers.compiled",
    "deferral": "trainers.deferral",
    "dropout": "trainers.dropout",
    "families": "trainers.families",
    "large": "trainers.large",
    "lengths": "trainers.lengths",
    "loop": "trainers.loop",
    "masks": "trainers.masks",
    "shapes": "trainers.shapes",
    "split-cost": "trainers.split_cost",
    "stale": "trainers.stale",
    "tied": "trainers.tied",
}
"""The module of each command. `measure()` of a module gives the printed object."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument("--json", action="store_true", help="in one line")
    options = parser.parse_args()
    print(json.dumps(import_module(COMMANDS[options.name]).measure(), indent=None if options.json else 2))


if __name__ == "__main__":
    main()
