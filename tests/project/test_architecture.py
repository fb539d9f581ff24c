"""The house holds: imports go one way, the compiler loads no torch, every file says what it is for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from project import closures, house, house_imports
from project.closures import Closure
from project.house_imports import module_name
from project.room_order import ROOMS
from support.paths import ROOT

COMPILER, RUNTIME = house_imports.sources("schedc"), house_imports.sources("schedc_runtime")

RUNTIME_MAY_USE = (
    "schedc.ir",
    "schedc.step",
    "schedc.compiler",
    "schedc.diagnostics",
    "schedc.source",
    "schedc.interrupts",
    "schedc.units",
    "schedc.cell",
    "schedc.model",
    "schedc.plan",
    "schedc.drawing.graph",
    "schedc.search.unequal_floors",
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


@pytest.mark.parametrize("question", ["bytes that attention holds", "time of a cell", "which plans are legal"])
def test_a_question_leads_to_one_room(question: str) -> None:
    """One heading or bold head has the words, and names the function where it lies."""
    heads = re.findall(r"^#+ (.+)|\*\*([^*]+)\*\*", DOCUMENT, re.MULTILINE)
    (head,) = [head for pair in heads for head in pair if question in head.lower()]
    (named,) = re.findall(r"`([\w.]+)`", head)
    module, _, function = named.rpartition(".")
    assert function in {
        name for _, _, name in house_imports.written(house_imports.modules()[f"schedc.{module}"]).functions
    }


def test_every_room_stands_in_the_order() -> None:
    assert house_imports.without_place() == []


@pytest.mark.slow
def test_imports_go_down() -> None:
    assert (house_imports.upward(), house_imports.sideways()) == ([], [])


def test_the_compiler_loads_no_torch() -> None:
    for path in COMPILER:
        tops = {name.partition(".")[0] for name in house_imports.imported_names(path)}
        assert not tops & {"torch", "schedc_runtime"}, path


def test_nothing_imports_itself_through_others() -> None:
    graph = house_imports.files()
    assert house_imports.circles(graph) == []
    assert house_imports.circles(house_imports.rooms(graph)) == []
    assert house_imports.circles(house_imports.folders(graph)) == []


@pytest.mark.parametrize("module", house.MUST_KNOW)
def test_a_change_needs_few_files(module: str) -> None:
    assert len(house_imports.must_know(module)) <= house.MUST_KNOW[module]


@pytest.mark.slow
@pytest.mark.parametrize("held", closures.CLOSURES, ids=lambda held: held.module)
def test_a_file_stands_on_few_lines(held: Closure) -> None:
    """`python tests/project/closures.py MODULE` shows the rooms and the importing files."""
    names = closures.closure(held.module, held.left_out)
    assert closures.lines(names) <= held.lines
    loaded = [name for name in names - closures.LOOKUPS if closures.looked_up(name).unknown]
    assert loaded == [], "modules are loaded by values that no count sees"


def test_lookups_count_as_imports() -> None:
    text = 'import_module("schedc.ir.ops")\nimport_module(f"schedc.{name}")\nrun = "elaborate.schedule:schedule"\n'
    text += 'importlib.import_module(name)\nwriter = "trace:export"\nplace = "file.sched:name"\n'
    found = closures.read_lookups(text, "schedc.interchange")
    assert found.modules == {"schedc.ir.ops", "schedc.elaborate.schedule", "schedc.interchange.trace"}
    assert found.unknown == (2, 4)
    everything = closures.closure("schedc_runtime.pipeline.pipeline")
    without = closures.closure("schedc_runtime.pipeline.pipeline", closures.ASKED_FOR)
    assert {house_imports.room(name) for name in everything} - {house_imports.room(name) for name in without} == set(
        closures.ASKED_FOR
    )


def test_no_class_has_the_name_of_another() -> None:
    """Two ideas with one name: docs/glossary.md says which word is free."""
    assert house.repeated("classes") == {}


def test_few_public_names_are_defined_twice() -> None:
    """`python tests/project/house.py` lists the doubles. `MOST_REPEATED` only shrinks."""
    assert len(house.repeated("public")) <= house.MOST_REPEATED


def test_the_glossary_gives_each_word_one_meaning() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!word |---)([^|]+) \|", text, re.MULTILINE)
    words = [word.strip() for row in rows for word in row.split(",")]
    assert len(words) == len(set(words))
    assert len(words) >= 40


def test_sizes() -> None:
    assert list(house.long_functions()) == []
    assert house.long_files() == {}
    for median in house.median_lines().values():
        assert 90 <= median <= 150


READERS = {
    "elaborate/fastest.py": "whether an order runs as it is written",
    "exact/times.py": "the chain of cells behind a time",
    "interchange/dot.py": "the edges of a graph",
    "interchange/trace.py": "the arrows of a trace",
    "search/problem.py": "the arcs of a problem, which its solvers and `choose` read",
}
"""The files outside `step` that read what cells and ops wait for, and what each makes of it: no timeline."""


def reads_waits(text: str) -> bool:
    """Whether a file reads `Dependencies.producers`, or calls `needs_of`."""
    if "needs_of" not in text and "producers" not in text:  # most files, without a walk
        return False
    nodes = list(ast.walk(ast.parse(text)))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return "needs_of" in called or any(isinstance(node, ast.Attribute) and node.attr == "producers" for node in nodes)


def test_few_files_outside_step_read_what_cells_wait_for() -> None:
    """A simulation of a schedule needs it. `elaborate.zero_bubble` goes without: its ranks are a chain of stages."""
    package = ROOT / "schedc"
    outside = [path for path in COMPILER + RUNTIME if package / "step" not in path.parents]
    readers = [path for path in outside if reads_waits(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(package).as_posix() for path in sorted(readers)] == sorted(READERS)
    assert reads_waits("def ends(order, end):\n for c in order.levels.order: end[c] = end[order.producers[0, c]] + 1")


def test_circles_and_levels_are_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    frozen = {name: frozenset(targets) for name, targets in graph.items()}
    assert house_imports.circles(frozen) == [["a", "b", "c"]]
    assert house_imports.reachable(frozen, "d") == {"a", "b", "c"}


def test_runtime_uses_only_what_it_may() -> None:
    for path in RUNTIME:
        for imported in house_imports.imported_names(path):
            if imported.startswith("schedc."):
                assert imported.startswith(RUNTIME_MAY_USE), f"{module_name(path)} imports {imported}"


def test_every_file_says_what_it_is_for() -> None:
    for path in COMPILER + RUNTIME:
        doc = house_imports.written(path).says
        assert doc, f"{path} has no docstring"
        assert doc.split("\n\n")[0].rstrip().endswith((".", "?", ":")), f"{path}: the first sentence does not end"


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def test_no_user_text_is_ever_executed() -> None:
    for path in COMPILER:
        read = house_imports.written(path)
        for line, name in read.called:
            assert name not in FORBIDDEN_CALLS, f"{path}:{line} calls {name}"
        names = {part for each in read.imports for part in each.split(".")}
        assert not {"pickle", "marshal", "shelve"} & names, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["check", "1f1b"], ["export", "1f1b", "--to", "csv"], ["plan", "--help"], ["plan", "list"]],
)
def test_commands_load_neither_torch_nor_sympy(arguments: list[str]) -> None:
    """`compile` writes files; its imports are those of check and export and the drawing, tested in test_cli."""
    program = (
        "import sys\nfrom schedc.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'sympy', 'schedc_runtime', 'graphviz', 'cairosvg'} & set(sys.modules)))\n"
        "print('PLANS', sorted({'numpy', 'scipy', 'numba', 'schedc.planner'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "LOADED []" in result.stdout
    expected = {
        "check": "['numpy']",
        "export": "['numpy']",
        "plan": "['schedc.planner']" if "list" in arguments else "[]",
    }
    assert f"PLANS {expected.get(arguments[0], '[]')}" in result.stdout
