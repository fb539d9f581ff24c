"""The figures of the house: imports, sizes, names, shapes and prose of both packages, as JSON.

    python tests/project/house.py                 all figures
    python tests/project/house.py --file PATH     what is left to mend in a file, by line

`test_architecture.py` and `test_prose.py` hold these figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project import house_imports, house_shapes, prose
from support.paths import ROOT

MOST_LINES = {"function": 50, "file": 400}
MOST_REPEATED = 30
"""Public names that may be defined in two files. The count only shrinks."""

MUST_KNOW = {"schedc_runtime.execute.handlers": 20, "schedc.elaborate.names": 10, "schedc.ir.ops": 4}
"""The most files, itself included, that one must know to change a file."""


def figures() -> dict[str, Any]:
    """Everything that is measured, by name."""
    graph = house_imports.files()
    asked = [one for path in _sources() for one in house_shapes.required(path)]
    faults = Counter(fault.rule for path in prose.files() for fault in prose.faults(path))
    return {
        "circles of files": house_imports.circles(graph),
        "circles of rooms": house_imports.circles(house_imports.rooms(graph)),
        "circles of folders": house_imports.circles(house_imports.folders(graph)),
        "upward imports": house_imports.upward(),
        "sideways imports": house_imports.sideways(),
        "files to know": {module: len(house_imports.must_know(module)) for module in MUST_KNOW},
        "classes defined twice": repeated("classes"),
        "public names defined twice": repeated("public"),
        "long functions": [f"{where}:{line} {name}" for where, line, name in long_functions()],
        "long files": long_files(),
        "median lines of a file": median_lines(),
        "docstrings that need a shape or unit": len(asked),
        "docstrings without": sum(one.silent for one in asked),
        "prose": dict(sorted(faults.items())),
    }


def repeated(names: str) -> dict[str, list[str]]:
    """Names that more than one file of the packages defines, with these files. names: `classes` or `public`."""
    defined: dict[str, set[str]] = {}
    for path in _sources():
        for name in getattr(house_imports.written(path), names):
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


def of_file(path: Path) -> Iterator[str]:
    """What is left to mend in a file, one line each."""
    for fault in prose.faults(path):
        yield f"{where(path)}:{fault.line}: {fault.rule}: {fault.sentence}"
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
    options = parser.parse_args()
    if options.file:
        wanted = [path.resolve() for path in options.file]
        for path in prose.files():
            if any(path == each or each in path.parents for each in wanted):
                print("\n".join(of_file(path)), end="\n" if any(True for _ in of_file(path)) else "")
    else:
        print(json.dumps(figures(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
