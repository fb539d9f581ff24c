"""Who imports whom in both packages: circles, sideways and upward imports, and what one must know to change a file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from project.room_order import LEVELS, ROOMS
from support.paths import ROOT

PACKAGES = {"schedc": ROOT / "schedc", "schedc_runtime": ROOT / "runtime" / "schedc_runtime"}

Graph = Mapping[str, frozenset[str]]
"""By name of a module or folder: those that it imports."""


def sources(package: str) -> list[Path]:
    """The files of a package."""
    return sorted(PACKAGES[package].rglob("*.py"))


def module_name(path: Path) -> str:
    """The name by which a file of either package is imported."""
    base = ROOT / "runtime" if PACKAGES["schedc_runtime"] in path.parents else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """The files of both packages by the names of their modules."""
    return {module_name(path): path for package in PACKAGES for path in sources(package)}


class Written(NamedTuple):
    """What the rules of the house ask of a file's text, read once.

    imports: every module that it imports, for types and inside functions, too; of ``from a import b`` ``a.b`` as well.
    classes: names. public: functions and classes of the module itself, without private ones.
    functions: (first line, last line, name). called: (line, name) of calls by a plain name. says: the
    module's docstring.
    """

    imports: tuple[str, ...]
    classes: tuple[str, ...]
    public: tuple[str, ...]
    functions: tuple[tuple[int, int, str], ...]
    called: tuple[tuple[int, str], ...]
    says: str | None


@cache
def written(path: Path) -> Written:
    """What stands in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports: list[str] = []
    classes: list[str] = []
    functions: list[tuple[int, int, str]] = []
    called: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            imports += (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, node.end_lineno or node.lineno, node.name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.append((node.lineno, node.func.id))
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = (node.name for node in tree.body if isinstance(node, definitions) and not node.name.startswith("_"))
    lists = map(tuple, (imports, classes, public, functions, called))
    return Written(*lists, ast.get_docstring(tree))


def imported_names(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, for types and inside functions, too; of ``from a import b`` ``a.b`` as well."""
    return written(path).imports


@cache
def files() -> Graph:
    """Imports between files. ``from a import b`` leads to the module ``a.b`` if there is one, else to ``a``."""
    known = modules()

    def target(name: str) -> str | None:
        return name if name in known else name.rpartition(".")[0] if name.rpartition(".")[0] in known else None

    return {
        name: frozenset(t for imported in imported_names(path) if (t := target(imported)) and t != name)
        for name, path in known.items()
    }


def room(module: str) -> str:
    """The room of a module as ``package.room``: a folder of the package's own level, or a file there."""
    return ".".join(module.split(".")[:2])


def rooms(graph: Graph) -> Graph:
    """Imports between rooms of one package; the packages' own ``__init__`` is left out."""
    merged: dict[str, set[str]] = {room(name): set() for name in graph if "." in name}
    for name, targets in graph.items():
        for target in targets:
            if "." in name and "." in target and _package(name) == _package(target) and room(name) != room(target):
                merged[room(name)].add(room(target))
    return {name: frozenset(targets) for name, targets in merged.items()}


def folders(graph: Graph) -> Graph:
    """Imports between folders that hold files, nested ones by themselves. The packages' own level is left out."""
    known = modules()
    folder = {name: str(path.parent.relative_to(ROOT)) for name, path in known.items()}
    packages = {str(path.relative_to(ROOT)) for path in PACKAGES.values()}
    merged: dict[str, set[str]] = {}
    for name, targets in graph.items():
        merged.setdefault(folder[name], set()).update(folder[target] for target in targets)
    return {name: frozenset(targets - {name} - packages) for name, targets in merged.items() if name not in packages}


def circles(graph: Graph) -> list[list[str]]:
    """The groups of nodes that reach each other (strongly connected components of more than one node), sorted."""
    reach = {name: reachable(graph, name) for name in graph}
    groups = {
        frozenset({name, *(other for other in reach[name] if name in reach.get(other, ()))})
        for name in graph
        if any(name in reach.get(other, ()) for other in reach[name])
    }
    return sorted(sorted(group) for group in groups)


def reachable(graph: Graph, start: str) -> frozenset[str]:
    """What ``start`` imports, directly or through others, without itself."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph.get(name, ())
    return frozenset(seen - {start})


def must_know(module: str) -> list[str]:
    """A file and all files of its package that it imports, directly or through others, for types too."""
    return sorted({module, *(name for name in reachable(files(), module) if _package(name) == _package(module))})


def upward() -> list[tuple[str, str]]:
    """Imports of a room that stands above the importing file's own."""
    return sorted(pair for pair in _between_rooms() if _level(pair[1]) > _level(pair[0]))


def sideways() -> list[tuple[str, str]]:
    """Imports between two rooms of one level."""
    return sorted(pair for pair in _between_rooms() if _level(pair[1]) == _level(pair[0]))


def _between_rooms() -> Iterable[tuple[str, str]]:
    for name, targets in files().items():
        for target in targets:
            if "." in name and "." in target and _package(name) == _package(target) and room(name) != room(target):
                yield name, target


def _level(module: str) -> int:
    package, own = module.split(".")[:2]
    (level,) = [number for number, names in enumerate(LEVELS[package]) if own in names]
    return level


def _package(module: str) -> str:
    return module.partition(".")[0]


def without_place() -> list[str]:
    """Modules whose room the order does not list."""
    return sorted(name for name in modules() if "." in name and name.split(".")[1] not in ROOMS[_package(name)])
