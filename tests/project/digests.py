"""Digests of everything the library gives: written before a change and after it, then compared.

    python tests/project/digests.py write FILE [--only GROUP ...]
    python tests/project/digests.py compare OLD NEW [--only GROUP ...]

A file holds {case: sha256}; `write` replaces a group as a whole. `compare` prints each case that differs, or that only
one file has, and exits with 1.

The tool uses stable interfaces alone (the command line, `schedc.compile`, `Pipeline`, `Mesh`). So one version of it
runs on old and new commits: call it with the interpreter of the commit's environment, from the root of its checkout.

Groups: `compile`: programs (JSON, text, columns), CSV and SVG of the library at several sizes. `text`: what all other
commands print or write. `plans`: prices, bounds, predictions and files of 200 plans, each double in hex.
`steps`: losses, gradients, parameters and the order of execution of training steps.
`words`: sentences for people: diagnostics, help, explanations, hover texts. An intended change of wording shows in
`words` alone, or in a table of `text`; `compile`, `steps` and `plans` never change.

Comment lines of schedules and examples are left out before they are compiled: rewording them changes `words` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

GROUPS = ("compile", "text", "words", "steps", "plans")


def main() -> int:
    """Write digests, or compare two files of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("file", type=Path)
    compare = commands.add_parser("compare")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    for command in (write, compare):
        command.add_argument("--only", action="append", choices=GROUPS, help="these groups; may be repeated")
    options = parser.parse_args()
    groups = tuple(options.only or GROUPS)
    if options.command == "compare":
        return compared(load(options.old, groups), load(options.new, groups))
    file = options.file.resolve()
    for group in groups:
        began = time.monotonic()
        cases = {f"{group}/{case}": digest for case, digest in cases_of(group)}
        others = load(file, tuple(each for each in GROUPS if each != group)) if file.exists() else {}
        file.write_text(json.dumps(dict(sorted({**others, **cases}.items())), indent=0) + "\n", encoding="utf-8")
        print(f"{group}: {len(cases)} digests in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def cases_of(group: str) -> Iterator[tuple[str, str]]:
    """(case, sha256) of a group, worked out in a folder of its own."""
    import digest_commands
    import digest_plans
    import digest_steps

    root = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="digests.") as folder:
        os.chdir(folder)
        try:
            if group == "steps":
                yield from digest_steps.cases()
            elif group == "plans":
                yield from digest_plans.cases(root)
            else:
                yield from digest_commands.cases(group, root)
        finally:
            os.chdir(root)


def load(path: Path, groups: tuple[str, ...]) -> dict[str, str]:
    digests: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return {case: digest for case, digest in digests.items() if case.partition("/")[0] in groups}


def compared(old: dict[str, str], new: dict[str, str]) -> int:
    """Print what differs; 1 if anything does."""
    states = {
        **dict.fromkeys(old.keys() - new.keys(), "only in the old file"),
        **dict.fromkeys(new.keys() - old.keys(), "only in the new file"),
        **{case: "differs" for case in old.keys() & new.keys() if old[case] != new[case]},
    }
    for case, state in sorted(states.items()):
        print(f"{case}: {state}")
    print(f"{len(old.keys() & new.keys())} cases in both files, {len(states)} differences")
    return 1 if states else 0


if __name__ == "__main__":
    sys.exit(main())
