"""The house holds: imports go one way, the compiler loads no torch, every file says what it is for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from project.room_order import ROOMS
from support.paths import ROOT

COMPILER = sorted((ROOT / "schedc").rglob("*.py"))
RUNTIME = sorted((ROOT / "runtime" / "schedc_runtime").rglob("*.py"))

RUNTIME_MAY_USE = (
    "schedc.ir",
    "schedc.passes",
    "schedc.compiler",
    "schedc.cost",
    "schedc.diagnostics",
    "schedc.analysis",
    "schedc.source",
    "schedc.interrupts",
    "schedc.layout",
    "schedc.cell",
    "schedc.plan",
    "schedc.draw.graph",
)


DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ROOMS)
def test_the_document_walks_the_rooms_in_their_order(package: str) -> None:
    walk = DOCUMENT.split(f"<!-- order: {package} -->")[1].split("\n## ")[0]
    heads = [name for bold in re.findall(r"\*\*(`[^*]*`)\*\*", walk) for name in re.findall(r"`(\w+)/?`", bold)]
    assert heads == list(ROOMS[package])


def test_the_document_lists_what_the_runtime_uses() -> None:
    (listed,) = re.findall(r"<!-- the compiler's modules that the runtime may use -->\n([^\n]*)", DOCUMENT)
    assert {f"schedc.{name}" for name in re.findall(r"`([\w.]+)`", listed)} == set(RUNTIME_MAY_USE)


def module_name(path: Path) -> str:
    base = ROOT / "runtime" if path in RUNTIME else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def room(name: str) -> str:
    return name.split(".")[1]


UPWARD = {
    ("schedc.analysis.difference", "schedc.formulas.measure"),
    ("schedc.compiler", "schedc.report.plan"),
    ("schedc_runtime.execute.executor", "schedc_runtime.data_parallel.gradient_sums"),
    ("schedc_runtime.recompute.adaptive", "schedc_runtime.moe.exchange"),
    ("schedc_runtime.recompute.adaptive", "schedc_runtime.moe.hot"),
    ("schedc_runtime.recompute.levels", "schedc_runtime.moe.exchange"),
}
"""Imports that still go up; none may be added."""


@pytest.mark.parametrize("path", COMPILER + RUNTIME, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    name = module_name(path)
    package, _, own = name.partition(".")
    if not own:
        return
    order = ROOMS[package]
    assert room(name) in order, f"{name} has no room"
    for imported in imports(path):
        top = imported.partition(".")[0]
        assert package == "schedc_runtime" or top not in {"torch", "schedc_runtime"}, f"{name} imports {imported}"
        if top == package and "." in imported and (name, imported) not in UPWARD:
            up = order.index(room(imported)) > order.index(room(name))
            assert not up, f"{name} imports {imported}, which is above it"


@pytest.mark.parametrize("path", RUNTIME, ids=module_name)
def test_runtime_uses_only_what_it_may(path: Path) -> None:
    for imported in imports(path):
        if imported.startswith("schedc."):
            assert imported.startswith(RUNTIME_MAY_USE), f"{module_name(path)} imports {imported}"


@pytest.mark.parametrize("path", COMPILER + RUNTIME, ids=module_name)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, f"{path} has no docstring"
    assert doc.split("\n\n")[0].rstrip().endswith((".", "?", ":")), f"{path}: the first sentence does not end"


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", COMPILER, ids=module_name)
def test_no_user_text_is_ever_executed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "marshal", "shelve"} & set(names), f"{path}:{node.lineno}"


@pytest.mark.parametrize("arguments", [["--help"], ["check", "1f1b"], ["export", "1f1b", "--to", "csv"]])
def test_commands_load_neither_torch_nor_sympy(arguments: list[str]) -> None:
    """`compile` writes files; its imports are those of check and export and the drawing, tested in test_cli."""
    program = (
        "import sys\nfrom schedc.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'sympy', 'schedc_runtime', 'graphviz', 'cairosvg'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "LOADED []" in result.stdout
