"""`schedc plan`: options that do not go together, and two plan files beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from support.html_page import PageReader
from support.written_plans import written_plans


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written_plans(tmp_path / "plans")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "say what to do"),
        ("gpt2 h100", "say what to do"),
        ("gpt2 --list", "MODEL"),
        ("gpt2 --show-model --force", "--force does not go with --show-model"),
        ("--compare pyproject.toml pyproject.toml --force", "--force needs -o"),
        ("--list --seq 9", "--seq does not go with --list"),
        ("--show-model", "needs a MODEL"),
        ("--compare pyproject.toml pyproject.toml --fit pyproject.toml", "--fit does not go with --compare"),
        ("--predict pyproject.toml gpt2", "does not go with --predict"),
    ],
)
def test_options_that_do_not_go_together(line: str, text: str) -> None:
    result = schedc(*line.split())
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


def test_two_plan_files_are_compared(folder: Path) -> None:
    paths = [str(folder / name) for name in ("01.sched", "02.sched")]
    result = schedc("--compare", *paths)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith("A is faster by ")
    assert "recomputation" in result.stdout.splitlines()[-1]
    facts = json.loads(schedc("--compare", *paths, "--json").stdout)
    assert (facts["schema"], facts["files"]) == ("schedc.plan_comparison", paths)


def test_a_comparison_is_a_page_too(folder: Path) -> None:
    paths = [str(folder / name) for name in ("01.sched", "02.sched")]
    page = folder / "compared.html"
    assert schedc("--compare", *paths, "-o", str(page)).exit_code == 0
    assert "A is faster by " in page.read_text()
    assert sorted(PageReader(page.read_text()).page_data["pictures"]) == paths
    again = schedc("--compare", *paths, "-o", str(page))
    assert (again.exit_code, "--force" in again.stderr) == (2, True)
    assert schedc("--compare", *paths, "-o", str(page), "--force").exit_code == 0
    other = schedc("--compare", *paths, "-o", str(folder / "compared.svg"))
    assert (other.exit_code, "FILE.html" in other.stderr) == (2, True)


def test_a_plan_without_waterfall_is_a_finding(folder: Path) -> None:
    stranger = folder / "mine.sched"
    stranger.write_text("a plan")
    result = schedc("--compare", str(folder / "01.sched"), str(stranger))
    assert (result.exit_code, "error[S751]" in result.stderr) == (1, True)
