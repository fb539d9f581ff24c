"""`schedc plan`: options that do not go together, two plan files beside each other, and the line of progress."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.cli.plan_progress import ProgressLine
from schedc.planner.presets.tables import files
from schedc.planner.search.standing import SearchStanding, SecondsLeft
from support.html_page import PageReader
from support.paths import ROOT
from support.written_plans import written_plans


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written_plans(tmp_path / "plans")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "Usage: "),
        ("gpt2 h100", "Missing option '--batch'"),
        ("gpt2 --batch 8x1024", "Missing argument 'CLUSTER'"),
        ("--batch 8x1024", "Missing argument 'MODEL'"),
        ("gpt2 h100 --batch 8", "is not SEQUENCESxTOKENS"),
        ("gpt2 h100 --batch 0x1024", "is not SEQUENCESxTOKENS"),
        ("gpt2 h100 --batch 8x1024 --explain tp", "'tp' is not AXIS=VALUE"),
        ("gpt2 h100 --batch 8x1024 --explain tp=1,tp=2", "each axis once"),
        ("gpt2 h100 --batch 8x1024 --vary gemm", "--vary is about the sliders of --explain"),
        ("gpt2 h100 --batch 8x1024 --seq 9", "No such option '--seq'"),
        ("gpt2 h100 --batch 8x1024 --show-model", "No such option '--batch'"),
        ("gpt2 h100 --batch 8x1024 --force", "--force needs -o FOLDER"),
        ("gpt2 h100 --batch 8x1024 -D P=4", "no size 'P'"),
        ("gpt2 --show-model --top 3", "No such option '--top'"),
        ("gpt2 --list", "unexpected extra argument (gpt2)"),
        ("--list --require pp>4", "No such option '--require'"),
        ("--show-model", "Missing argument 'MODEL'"),
        ("--compare pyproject.toml pyproject.toml --fit pyproject.toml", "No such option '--fit'"),
        ("--predict pyproject.toml gpt2", "unexpected extra argument (gpt2)"),
    ],
)
def test_options_that_do_not_go_together(line: str, text: str) -> None:
    result = schedc(*line.split())
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--list --json", "list --json"),
        ("gpt2 --seq 512 --show-model h100", "show gpt2 h100 --seq 512"),
        ("--json --predict=simumax_b200.csv", "predict simumax_b200.csv --json"),
        ("-o x --compare simumax_b200.csv ../README.md", "compare simumax_b200.csv ../README.md -o x"),
        ("--batch 8x1024 gpt2 h100 -D P=8", "search gpt2 h100 -D P=8 --batch 8x1024"),
    ],
)
def test_arguments_without_a_command_mean_one(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "benchmarks" / "published")
    before, after = schedc(*old.split()), schedc(*new.split())
    assert (before.exit_code, before.output) == (after.exit_code, after.output)


def test_two_plan_files_are_compared(folder: Path) -> None:
    paths = [str(folder / name) for name in ("01.sched", "02.sched")]
    result = schedc("compare", *paths)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith("A is faster by ")
    assert "recomputation" in result.stdout.splitlines()[-1]
    facts = json.loads(schedc("compare", *paths, "--json").stdout)
    assert (facts["schema"], facts["files"]) == ("schedc.plan_comparison", paths)


def test_a_comparison_is_a_page_too(folder: Path) -> None:
    paths = [str(folder / name) for name in ("01.sched", "02.sched")]
    page = folder / "compared.html"
    assert schedc("compare", *paths, "-o", str(page)).exit_code == 0
    assert "A is faster by " in page.read_text()
    assert sorted(PageReader(page.read_text()).page_data["pictures"]) == paths
    again = schedc("compare", *paths, "-o", str(page))
    assert (again.exit_code, "--force" in again.stderr) == (2, True)
    assert schedc("compare", *paths, "-o", str(page), "--force").exit_code == 0
    other = schedc("compare", *paths, "-o", str(folder / "compared.svg"))
    assert (other.exit_code, "FILE.html" in other.stderr) == (2, True)


def test_a_plan_without_waterfall_is_a_finding(folder: Path) -> None:
    stranger = folder / "mine.sched"
    stranger.write_text("a plan")
    result = schedc("compare", str(folder / "01.sched"), str(stranger))
    assert (result.exit_code, "error[S751]" in result.stderr) == (1, True)


@pytest.mark.slow
def test_no_refusal_loads_the_compiler() -> None:
    """Neither the parser of schedules nor the search, which take longer than all else of a refusal."""
    lines = [
        "gpt2 h100 -D devices=12 --batch 8x1024",
        "gpt2 h100 -D devices=8 --batch 8x1024 --require pp>=200",
        f"gpt2 b200 -D devices=8 --batch 8x1024 --fit {files('fits')['bloom']}",
    ]
    program = (
        "import sys\nfrom schedc.cli import main\n"
        f"for line in {lines!r}:\n"
        "    try: main(['plan', *line.split()])\n"
        "    except SystemExit: pass\n"
        "print([name for name in ('lark', 'schedc.compiler', 'schedc.planner.search') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(f"error[{code}]" in result.stderr for code in ("S707", "S712", "S726"))
    assert result.stdout == "[]\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.0, 1.01, 2.0, 2.0])
    monkeypatch.setattr("schedc.cli.plan_progress.time.monotonic", lambda: next(clock))
    screen, pipe = Terminal(), io.StringIO()
    with ProgressLine(screen) as progress:
        progress("bounds", 12_000)
        progress("bounds", 13_000)
        progress("prices", 3)
    assert screen.getvalue() == "\rbounds: 12,000 plans\rprices: 3 plans     \r               \r"
    with ProgressLine(pipe) as progress:
        progress("bounds", 12_000)
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(
    ("standing", "text"),
    [
        ((0.99999, (11.2, 11.6), 2.36612), "priced: 3 plans, 99.9 % decided, about 12 s left, best step 2.366 s"),
        ((0.5, (11.2, 30.0), None), "priced: 3 plans, 50.0 % decided, 11 to 30 s left"),
        ((0.5, (0.2, 30.0), None), "priced: 3 plans, 50.0 % decided, up to 30 s left"),
        ((1.0, None, 2.0), "priced: 3 plans, 100.0 % decided, best step 2.000 s"),
        ((None, None, None), "priced: 3 plans"),
    ],
)
def test_progress_says_where_the_search_stands(
    standing: tuple[float | None, tuple[float, float] | None, float | None], text: str
) -> None:
    """The share that is decided is rounded down, and what is not known is left out."""
    decided, left, best = standing
    screen = Terminal()
    with ProgressLine(screen) as progress:
        progress("priced", 3, lambda: SearchStanding(decided, left and SecondsLeft(*left), best))
    assert screen.getvalue().split("\r")[1] == text
