"""Counts the lines that a file stands on: lines of the file and of every file behind its imports.

    python tests/project/closures.py schedc_runtime.execute.bind      rooms, what goes without each, and who imports it

Imports for types and imports inside functions count. So does a text ``room.file:name``, by which a function is looked
up, and the argument of `import_module`. `test_architecture.py` holds the limits.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project.house_imports import files, modules, room

NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
LOADERS = frozenset({"import_module", "__import__", "spec_from_file_location", "run_module"})
"""Calls that load a module whose name is a value."""


class Closure(NamedTuple):
    """What the architecture test holds. lines: the most. left_out: rooms that load on demand."""

    module: str
    lines: int
    left_out: tuple[str, ...] = ()


ASKED_FOR = tuple(
    f"schedc_runtime.{name}"
    for name in (
        "fusion",
        "compiled",
        "materialize",
        "offload",
        "checkpoint",
        "saved",
        "triton_kernels",
        "capture",
        "transit",
        "loss_providers",
        "migration",
        "tensor_parallel",
        "row_flow",
        "layer_levels",
        "telemetry",
    )
)
CLOSURES = (
    Closure("schedc_runtime.execute.bind", 5_000),
    Closure("schedc.compiler", 35_300),
    Closure("schedc_runtime.pipeline.pipeline", 53_050, ASKED_FOR),
)
LOOKUPS = frozenset({"schedc.plan.passes", "schedc_runtime.kernels.library"})
"""Files that may load a module by a value: the values are texts ``room.file:name``, each counted in its file."""


class Looked(NamedTuple):
    """What a file looks up. modules: that texts name. unknown: lines of calls that load a module by another value."""

    modules: frozenset[str]
    unknown: tuple[int, ...]


@cache
def looked_up(module: str) -> Looked:
    """What a file looks up by name. A text may leave out the package, or the folders of the file."""
    path = modules()[module]
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return read_lookups(path.read_text(encoding="utf-8"), folder)


def read_lookups(text: str, folder: str) -> Looked:
    """The lookups in the text of a file that lies in ``folder``, a dotted name."""
    parts = folder.split(".")
    folders = ["", *(".".join(parts[: number + 1]) + "." for number in range(len(parts)))]
    named: set[str] = set()
    unknown: list[int] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := NAMED.fullmatch(node.value)):
            named.add(match[1])
        elif isinstance(node, ast.Call) and _name(node.func) in LOADERS:
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                named.add(argument.value)
            else:
                unknown.append(node.lineno)
    known = {f"{before}{name}" for name in named for before in folders} & modules().keys()
    return Looked(frozenset(known), tuple(unknown))


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def closure(module: str, left_out: Collection[str] = (), without: str = "") -> frozenset[str]:
    """The files that one must know of both packages. left_out, without: rooms that are not entered."""
    seen, waiting = {module}, [module]
    while waiting:
        name = waiting.pop()
        for target in files()[name] | looked_up(name).modules:
            if target not in seen and room(target) not in left_out and room(target) != without:
                seen.add(target)
                waiting.append(target)
    return frozenset(seen)


@cache
def lines_of(module: str) -> int:
    return len(modules()[module].read_text(encoding="utf-8").splitlines())


def lines(names: Collection[str]) -> int:
    """The lines of these files."""
    return sum(map(lines_of, names))


def table(module: str, left_out: Collection[str] = ()) -> Iterator[str]:
    """A line for each room: lines in the closure, lines that only this room brings, and importing files."""
    whole = closure(module, left_out)
    yield f"{module}: {lines(whole):,} lines in {len(whole)} files; by room, lines that go without it, who imports it"
    by_room = Counter(dict.fromkeys(map(room, whole), 0))
    for name in whole:
        by_room[room(name)] += lines_of(name)
    for name, count in by_room.most_common():
        pulls = Counter(
            f"{one} -> {target.removeprefix(name + '.')}"
            for one in whole
            for target in files()[one] | looked_up(one).modules
            if room(target) == name != room(one) and target in whole
        )
        goes = lines(whole) - lines(closure(module, left_out, without=name)) if name != room(module) else count
        yield f"{count:6,} {goes:6,}  {name}  " + ", ".join(sorted(pulls)[:4]) + ", ..." * (len(pulls) > 4)


def main() -> None:
    for module in sys.argv[1:] or [each.module for each in CLOSURES]:
        left_out = next((each.left_out for each in CLOSURES if each.module == module), ())
        print("\n".join(table(module, left_out)), end="\n\n")


if __name__ == "__main__":
    main()
