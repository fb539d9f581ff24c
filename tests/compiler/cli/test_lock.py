"""`schedc lock` keeps figures, and `--diff` names each that a change of a schedule or of the file has moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from schedc.load.library import library_folder
from support.commands import schedc


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(library_folder() / "1f1b.sched", "own.sched")
    assert schedc("lock", "zbv", "-D", "P=2", "--cost", "p2p=0.5").exit_code == 0
    assert schedc("lock", "own.sched").exit_code == 0
    return tmp_path


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_what_did_not_change_passes(room: Path) -> None:
    result = schedc("lock", "--diff")
    assert (result.exit_code, result.stdout) == (0, "2 as in schedc.lock\n")
    before = Path("schedc.lock").read_bytes()
    assert schedc("lock").exit_code == 0
    assert Path("schedc.lock").read_bytes() == before


def test_a_changed_schedule_is_named_with_what_it_changes(room: Path) -> None:
    replaced(room / "own.sched", "let w = min(P-1-r, M)", "let w = min(P-1-r, M) + (r < P-1)")
    result = schedc("lock", "--diff")
    assert result.exit_code == 1
    assert {line.split(":")[0] for line in result.stdout.splitlines()} == {"own.sched at P = 4, M = 8"}
    assert "peak_activations was 4, 3, 2, 1, is 5, 4, 3, 1" in result.stdout
    assert "order was " in result.stdout
    assert schedc("lock").exit_code == 0
    assert schedc("lock", "--diff").exit_code == 0


def test_a_folder_is_its_files(room: Path) -> None:
    (room / "more").mkdir()
    for name in ("gpipe", "zbh1"):
        shutil.copy(library_folder() / f"{name}.sched", room / "more")
    assert schedc("lock", "more", "1f1b").exit_code == 0
    assert schedc("lock", "--diff").stdout == "5 as in schedc.lock\n"
    assert 'schedule = "more/zbh1.sched"' in (room / "schedc.lock").read_text(encoding="utf-8")


def test_a_changed_figure_of_the_file_is_named(room: Path) -> None:
    replaced(room / "schedc.lock", "makespan = 33.0", "makespan = 32.0")
    assert schedc("lock", "--diff").stdout == "own.sched at P = 4, M = 8: makespan was 32, is 33\n"


def test_a_schedule_that_is_no_longer_legal_is_a_finding(room: Path) -> None:
    replaced(room / "own.sched", "{ F  B }", "{ B  F }")
    result = schedc("lock", "--diff")
    assert (result.exit_code, "error[S" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-D", "P=4"), "need a SCHEDULE"),
        (("--diff", "zbv"), "give no schedule"),
        (("--diff", "--file", "gone.lock"), "there is no gone.lock"),
        (("--diff", "--file", "own.sched"), "own.sched: "),
        (("zbv", "--cost", "zzz=1"), "zzz"),
    ],
)
def test_wrong_usage(room: Path, words: tuple[str, ...], said: str) -> None:
    result = schedc("lock", *words)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    "text", ["[other]\n", "[[figures]]\nschedule = 1\n", "[[figures]]\nschedule = 'a'\nsizes = {P = 1.5}\ncosts = []\n"]
)
def test_a_file_of_another_form_is_refused(room: Path, text: str) -> None:
    Path("schedc.lock").write_text(text, encoding="utf-8")
    result = schedc("lock", "--diff")
    assert (result.exit_code, "schedc.lock: " in result.stderr) == (2, True)
