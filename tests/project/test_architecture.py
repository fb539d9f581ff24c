"""The house holds: imports go one way, the compiler loads no torch, every file says what it is for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

COMPILER = sorted((ROOT / "schedc").rglob("*.py"))
RUNTIME = sorted((ROOT / "runtime" / "schedc_runtime").rglob("*.py"))

LAYERS = (
    ("schedc.source",),
    ("schedc.interrupts",),
    ("schedc.diagnostics",),
    ("schedc.codes",),
    ("schedc.ir",),
    ("schedc.syntax",),
    ("schedc.cell",),
    ("schedc.cost",),
    ("schedc.check",),
    ("schedc.elaborate",),
    ("schedc.analysis", "schedc.exact", "schedc.claims", "schedc.formulas"),
    ("schedc.passes",),
    ("schedc.layout",),
    ("schedc.search",),
    ("schedc.load",),
    ("schedc.plan",),
    ("schedc.draw",),
    ("schedc.interchange",),
    ("schedc.inputs",),
    ("schedc.compiler", "schedc.report"),
    ("schedc.editor",),
    ("schedc.cli",),
    ("schedc.__main__",),
)
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


def test_the_document_lists_these_layers() -> None:
    order, runtime = re.findall(r"^`([^`]*<-[^`]*)`.*\n.*`schedc_runtime -> ([^`]*)`", DOCUMENT, re.M)[0]
    listed = [{f"schedc.{name}" for name in layer.split(", ")} for layer in order.split(" <- ")]
    assert listed == [set(members) for members in LAYERS if members != ("schedc.__main__",)]
    assert {f"schedc.{name.removeprefix('schedc.')}" for name in runtime.split(", ")} == set(RUNTIME_MAY_USE)


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


def layer(name: str) -> int | None:
    for level, members in enumerate(LAYERS):
        if any(name == member or name.startswith(member + ".") for member in members):
            return level
    return None


@pytest.mark.parametrize("path", COMPILER, ids=module_name)
def test_compiler_imports_go_down(path: Path) -> None:
    name = module_name(path)
    own = layer(name)
    assert own is not None or name == "schedc", f"{name} has no layer"
    for imported in imports(path):
        top = imported.partition(".")[0]
        assert top not in {"torch", "schedc_runtime"}, f"{name} imports {imported}"
        target = layer(imported)
        if own is not None and target is not None:
            assert target <= own, f"{name} imports {imported}, which is above it"


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
