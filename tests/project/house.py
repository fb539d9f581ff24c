"""The figures of the house: imports, sizes, names, shapes and prose of both packages, as JSON.

    python tests/project/house.py                 all figures
    python tests/project/house.py --file PATH     what is left to mend in a file, by line
    python tests/project/house.py --shrink        lower the counts of house_ratchet.json to what is left

`test_architecture.py` and `test_prose.py` hold these figures. The ratchet has what was left when a rule began: its
counts by rule and file may only shrink. Sentences that break a rule for a reason stand in house_exceptions.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project import house_imports, house_prose, house_shapes
from project.house_sentences import Hit
from support.paths import ROOT

HERE = Path(__file__).parent
RATCHET, EXCEPTIONS = HERE / "house_ratchet.json", HERE / "house_exceptions.toml"
MOST_LINES = {"function": 50, "file": 400}
MUST_KNOW = {"schedc_runtime.execute.handlers": 20, "schedc.check.names": 10, "schedc.ir.ops": 4}
"""The most files, itself included, that one must know to change a file."""

Counts = dict[str, dict[str, int]]
"""By rule and file: how often the rule is broken there."""


def figures() -> dict[str, Any]:
    """Everything that is measured, by name."""
    graph = house_imports.files()
    asked = [one for path in _sources() for one in house_shapes.required(path)]
    prose = Counter(hit.rule for path in house_prose.files() for hit in prose_hits(path))
    return {
        "circles of files": house_imports.circles(graph),
        "circles of rooms": house_imports.circles(house_imports.rooms(graph)),
        "circles of folders": house_imports.circles(house_imports.folders(graph)),
        "upward imports": house_imports.upward(),
        "sideways imports": house_imports.sideways(),
        "files to know": {module: len(house_imports.must_know(module)) for module in MUST_KNOW},
        "classes defined twice": repeated_classes(),
        "long functions": [f"{where}:{line} {name}" for where, line, name in long_functions()],
        "long files": long_files(),
        "median lines of a file": median_lines(),
        "docstrings that need a shape or unit": len(asked),
        "docstrings without": sum(one.silent for one in asked),
        "prose": dict(sorted(prose.items())),
    }


def counts() -> Counts:
    """What the ratchet holds: docstrings without shape or unit, and sentences that break a rule."""
    counted: dict[str, Counter[str]] = {}
    for path in _sources():
        if silent := sum(one.silent for one in house_shapes.required(path)):
            counted.setdefault("shape", Counter())[where(path)] += silent
    for path in house_prose.files():
        for hit in prose_hits(path):
            counted.setdefault(hit.rule, Counter())[where(path)] += 1
    return {rule: dict(sorted(files.items())) for rule, files in sorted(counted.items())}


def prose_hits(path: Path) -> list[Hit]:
    """Sentences of a file that break a rule, without those that are excepted."""
    excepted = [each["text"] for each in exceptions() if each["file"] == where(path)]
    return [hit for hit in house_prose.hits_of(path) if not any(hit.sentence.startswith(text) for text in excepted)]


@cache
def exceptions() -> list[dict[str, str]]:
    """Sentences that may break a rule: file, how the text begins, and the reason."""
    listed: list[dict[str, str]] = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8")).get("exception", [])
    return listed


def ratchet() -> Counts:
    held: Counts = json.loads(RATCHET.read_text(encoding="utf-8"))
    return held


def repeated_classes() -> dict[str, list[str]]:
    """Class names that more than one file of the packages defines, with these files."""
    defined: dict[str, set[str]] = {}
    for path in _sources():
        for name in house_imports.written(path).classes:
            defined.setdefault(name, set()).add(where(path))
    return {name: sorted(files) for name, files in sorted(defined.items()) if len(files) > 1}


def long_functions() -> Iterator[tuple[str, int, str]]:
    """(file, line, name) of functions with more lines than allowed, from ``def`` to the last line."""
    for path in _sources():
        for first, last, name in house_imports.written(path).functions:
            if last - first >= MOST_LINES["function"]:
                yield where(path), first, name


def long_files() -> dict[str, int]:
    """Files with more lines than allowed."""
    return {where(path): _lines(path) for path in _sources() if _lines(path) > MOST_LINES["file"]}


def median_lines() -> dict[str, float]:
    """The median number of lines of a file, by package; empty files do not count."""
    return {
        package: median(_lines(path) for path in house_imports.sources(package) if _lines(path))
        for package in house_imports.PACKAGES
    }


def shrunk(held: Counts, now: Counts) -> Counts:
    """The ratchet with each count lowered to what is left; what was not there before is not added."""
    lowered = {
        rule: {file: min(count, now.get(rule, {}).get(file, 0)) for file, count in files.items()}
        for rule, files in held.items()
    }
    return {rule: left for rule, files in lowered.items() if (left := {f: n for f, n in files.items() if n})}


def of_file(path: Path) -> Iterator[str]:
    """What is left to mend in a file, one line each."""
    for hit in prose_hits(path):
        yield f"{where(path)}:{hit.line}: {hit.rule}: {hit.sentence}"
    if path in _sources():
        for one in house_shapes.required(path):
            if one.silent:
                yield f"{where(path)}:{one.line}: shape: {one.name} has {one.why}"


def _sources() -> list[Path]:
    return [path for package in house_imports.PACKAGES for path in house_imports.sources(package)]


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, action="append", help="print what is left to mend in a file or folder")
    parser.add_argument("--shrink", action="store_true", help="lower the ratchet")
    options = parser.parse_args()
    if options.shrink:
        RATCHET.write_text(json.dumps(shrunk(ratchet(), counts()), indent=1) + "\n", encoding="utf-8")
    elif options.file:
        wanted = [path.resolve() for path in options.file]
        for path in house_prose.files():
            if any(path == each or each in path.parents for each in wanted):
                print("\n".join(of_file(path)), end="\n" if any(True for _ in of_file(path)) else "")
    else:
        print(json.dumps(figures(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
