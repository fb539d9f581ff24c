"""What the documents claim is run: console examples, schedules, links, option names."""

from __future__ import annotations

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from project.console import Command, File, run, session, shows
from schedc.cli import COMMANDS
from schedc.codes import CODES
from schedc.compiler import analyse, legal_schedule
from schedc.load.library import names, open_schedule
from schedc.schemas.shapes import outputs
from support.needs import needs
from support.paths import ROOT
from support.sweeps import swept

REFERENCE = ROOT / "docs" / "reference"
GENERATED = {
    REFERENCE / "codes": {"index", *CODES},
    REFERENCE / "commands": {"index", *COMMANDS},
    REFERENCE / "frontier": {"index"},
    REFERENCE / "schedules": {"index", *names()},
    REFERENCE / "schemas": {"index"},
    ROOT / "docs" / "guide" / "notebooks": {"index", *(path.stem for path in ROOT.glob("examples/notebooks/*.ipynb"))},
}
"""Folders of pages that `make docs` writes, and the names of their pages."""

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent not in GENERATED),
]


IN_SWEEPS = (
    "torchrun --nproc-per-node 8 train.py dense.json",
    "torchrun --nproc-per-node 8 train.py experts.json",
    "torchrun --nproc-per-node 4 split.py",
    "torchrun --nproc-per-node 2 llama.py",
    "torchrun --nproc-per-node 2 lit.py",
    "schedc run examples/04_plan/layers.sched:heads",
    "schedc doctor step/program.json",
    "schedc layout --layers 61 --dense 3 --mtp 1 --losses auto",
    "schedc report zbh1",
    "schedc check zbh1 --sweep 'P<=6, M<=3*P'",
    "schedc run dualpipev -D P=4 -D M=10 --check bitwise",
    "schedc run examples/03_own_schedule.sched --check bitwise",
    "schedc tune found/2.order --rule",
    "schedc plan llama-3.1-8b h100 -D devices=48",
    "schedc plan llama-3.1-8b h100 -D devices=64",
    "schedc plan qwen3-30b-a3b gb200-nvl72",
    "schedc plan llama-3.1-8b h100 -D devices=32 --batch 128x4096 --restrict megatron --top 3 --explain",
    "schedc plan llama-3.1-8b h100 -D devices=32 --batch 128x4096 --require 'pp >= 4",
)
"""How long commands begin that run in sweeps alone. No later command of a page needs their files.

Rooms have tests of the same words. The suite runs all other commands of these pages."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def console(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow a page from its top in a folder beside the examples; every output must be what the page shows."""
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    for part in session(path.read_text(encoding="utf-8")):
        if isinstance(part, File):
            (folder / part.name).write_text(part.text, encoding="utf-8")
            continue
        if part.line.startswith(swept((), IN_SWEEPS)):
            continue
        status, output = run(part, folder)
        assert status == part.status, f"{part.line}\n{output}"
        assert not part.shown or shows(part.shown, output), f"{part.line}\n{output}"


def pages(processes: bool) -> list[Path]:
    """The pages with commands: with processes, or without."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    commands = {path: [part for part in session(text) if isinstance(part, Command)] for path, text in texts.items()}
    return [path for path, each in commands.items() if each and any(c.starts_processes for c in each) == processes]


def quick_or_slow(paths: list[Path]) -> list[ParameterSet]:
    """The pages as parameters; those that derive formulas take longer."""
    slow = {path: "schedc report" in "".join(blocks(path, "console")) for path in paths}
    return [pytest.param(path, id=name_of(path), marks=[pytest.mark.slow] * slow[path]) for path in paths]


def needing_libraries(paths: list[Path]) -> list[ParameterSet]:
    """The pages as parameters; some train models of Transformers."""
    libraries = ("transformers", "pytorch_lightning")
    texts = {path: "".join(blocks(path, "python")) for path in paths}
    taken = {path: [each for each in libraries if f"from {each} import" in texts[path]] for path in paths}
    return [pytest.param(path, id=name_of(path), marks=[needs(*each)] if each else []) for path, each in taken.items()]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("path", quick_or_slow(pages(processes=False)))
def test_a_page_shows_what_its_commands_print(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console(path, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("path", needing_libraries(pages(processes=True)))
def test_a_page_that_trains_shows_what_its_commands_print(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console(path, tmp_path, monkeypatch)


def test_commands_that_run_in_sweeps_are_those_of_pages() -> None:
    sessions = (session(path.read_text(encoding="utf-8")) for path in DOCUMENTS)
    lines = [part.line for parts in sessions for part in parts if isinstance(part, Command)]
    assert [begin for begin in IN_SWEEPS if not any(line.startswith(begin) for line in lines)] == []


def test_only_commands_that_are_run_stand_in_console_blocks() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        commands = [part for part in session(text) if isinstance(part, Command)]
        assert len(commands) == len(re.findall(r"^\$ ", text, re.MULTILINE)), path
        assert {command.line.split()[0] for command in commands} <= {"schedc", "python", "torchrun"}, path


def test_the_schedule_of_the_readme_is_the_librarys(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "sched")
    path = tmp_path / "readme.sched"
    path.write_text(text, encoding="utf-8")
    analysis = analyse(path, {})
    library = legal_schedule(open_schedule("dualpipev"), {})
    for column in ("rank_start", "kind", "stage", "microbatch", "pair"):
        assert (getattr(analysis.schedule, column) == getattr(library, column)).all()
    assert [claim.holds for claim in analysis.claims] == [True] * len(analysis.claims)


def test_the_readme_lists_schedules_of_the_library() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## The library")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert len(listed) > 20
    assert set(listed) <= set(names())


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if "://" not in target:
            file = (path.parent / target).resolve()
            exists = file.stem in GENERATED[file.parent] if file.parent in GENERATED else file.exists()
            assert exists, f"{path.name}: {target}"


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_and_files_named_in_documents_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8").split("### Moved")[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"
    for name in re.findall(r"(?<![\w/])(?:benchmarks|examples|schedules)/[\w/]+\.\w+", text):
        assert (ROOT / name).exists(), f"{path.name}: {name}"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            if find_spec(module) is None:
                continue
        except ImportError:
            continue
        try:
            value: object = import_module(module)
        except ImportError:
            return True  # it is there, and needs a package that is not
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


OF_FILES_AND_EDITORS = {
    "schedc.lock",
    "schedc.toml",
    "schedc/preview",
    "schedc.preview",
    *(f"schedc.{name}" for name in ("step", "schedule", "rank", "replica")),
    *json.loads((ROOT / "editors/vscode/package.json").read_text())["contributes"]["configuration"]["properties"],
}
"""Files of a user, names of editors (a method, a command, settings), attributes of spans: like names of the package."""


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_modules_names_and_files_of_the_house_exist(path: Path) -> None:
    text = re.sub(r"```diff\n.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).split("### Moved")[0]
    names = set(re.findall(r"(?<![\w/.\"])((?:schedc|schedc_runtime)(?:\.\w+)+)(?![/\"])", text))
    folders = "schedc|runtime|tests|benchmarks|examples|schedules|docs|editors"
    files = set(re.findall(rf"(?<![\w/.=-])((?:{folders})/[\w/.-]*\w)", text))
    assert [name for name in names if not resolves(name) and name not in {*outputs(), *OF_FILES_AND_EDITORS}] == []
    missing = {file for file in files if not (ROOT / file).exists() and (ROOT / file).parent not in GENERATED}
    assert missing - OF_FILES_AND_EDITORS == set()


def test_the_hooks_before_a_commit_run_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\ncheck: ")[1].split("\n\n")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entry: (.+)", hooks) == re.findall(
        r"^\t(.+)", recipe.replace("$(BIN)", ".venv/bin"), re.MULTILINE
    )


def test_paths_that_moved_have_new_ones_that_exist() -> None:
    table = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("### Moved")[1].split("\n#")[0]
    rows = re.findall(r"^\| `.* \| (`.*) \|$", table, re.MULTILINE)
    assert len(rows) > 10
    names = [name for new in rows for name in re.findall(r"(?:schedc|schedc_runtime)(?:\.\w+)+", new)]
    assert [name for name in names if not resolves(name)] == []


def test_lines_to_alarm_on_are_lines_of_the_runtime() -> None:
    """The page for operators names parts of lines, which the runtime prints so."""
    page = (ROOT / "docs/guide/operating.md").read_text()
    rows = page[page.index("| line has |") :].split("\n\n")[0].splitlines()[2:]
    lines = [line for row in rows for line in re.findall(r"`(.+?)`", row.split(" | ")[0])]
    assert len(lines) >= 13
    sources = "".join(path.read_text() for path in (ROOT / "runtime").rglob("*.py"))
    assert [line for line in lines if line not in sources] == []
