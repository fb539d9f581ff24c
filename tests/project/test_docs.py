"""What the documents claim is run: console examples, schedules, links, option names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.codes import CODES
from schedc.compiler import analyse, legal_schedule
from schedc.load.library import names, open_schedule
from support.paths import ROOT

REFERENCE = ROOT / "docs" / "reference"
GENERATED = {
    REFERENCE / "codes": {"index", *CODES},
    REFERENCE / "commands": {"index", *main.commands},
    REFERENCE / "schedules": {"index", *names()},
}
"""Folders of pages that `make docs` writes, and the names of their pages."""

DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent not in GENERATED),
]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    """The ``$ schedc`` lines of all documents; `run` and what reads its traces are tested with the runtime."""
    lines = [line for path in DOCUMENTS for block in blocks(path, "console") for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ schedc ") and not re.search(" run | --trace ", line)]


@pytest.mark.parametrize("command", commands())
def test_console_examples_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output


def test_the_schedule_of_the_readme_is_the_librarys(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "sched")
    path = tmp_path / "readme.sched"
    path.write_text(text, encoding="utf-8")
    analysis = analyse(path, {})
    library = legal_schedule(open_schedule("dualpipev"), {})
    for column in ("rank_start", "kind", "stage", "microbatch", "pair"):
        assert (getattr(analysis.schedule, column) == getattr(library, column)).all()
    assert [claim.holds for claim in analysis.claims] == [True] * len(analysis.claims)


def test_the_readme_lists_the_library() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## The library")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(names())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            file = (path.parent / target).resolve()
            exists = file.stem in GENERATED[file.parent] if file.parent in GENERATED else file.exists()
            assert exists, f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_and_files_named_in_documents_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"
    for name in re.findall(r"(?<![\w/])(?:benchmarks|examples|schedules)/[\w/]+\.\w+", text):
        assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_the_hooks_before_a_commit_run_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\ncheck: ")[1].split("\n\n")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entry: (.+)", hooks) == re.findall(
        r"^\t(.+)", recipe.replace("$(BIN)", ".venv/bin"), re.MULTILINE
    )
