"""`schedc check` of files and folders: all findings, in the formats of other tools, and one refusal for other texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedc.cli import COMMANDS
from schedc.codes import CODES
from support.commands import schedc
from support.needs import needed, needs
from support.sarif_cases import lies_inside, logs, published_faults, sarif

ROOT = Path(__file__).resolve().parents[3]
WRONG = CODES["S501"].wrong


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a right file, a wrong one below it, and a text that is no schedule."""
    (tmp_path / "below").mkdir()
    (tmp_path / "right.sched").write_text(CODES["S501"].right, encoding="utf-8")
    (tmp_path / "below" / "wrong.sched").write_text(WRONG, encoding="utf-8")
    (tmp_path / "notes.md").write_text("# Notes\n\nA schedule { } of ours.\n", encoding="utf-8")
    return tmp_path


def test_a_folder_means_the_files_below_it(files: Path) -> None:
    result = schedc("check", str(files))
    assert result.exit_code == 1
    assert result.stdout == "2 files, 1 with findings\n"
    assert "below/wrong.sched:8:3" in result.stderr
    facts = json.loads(schedc("check", str(files / "right.sched"), str(files / "below"), "--json").stdout)
    assert [[one["code"] for one in each["diagnostics"]] for each in facts["files"]] == [[], ["S501"]]
    assert schedc("check", str(files / "right.sched"), str(files / "right.sched")).exit_code == 0


def test_files_are_checked_at_the_sizes_that_are_asked_for(files: Path) -> None:
    """A claim of the wrong file holds at P = 1; a size that none of the schedules has is a finding of each."""
    assert schedc("check", str(files), "--sizes", "P=1,M=2").stdout == "2 files, 0 with findings\n"
    twice = schedc("check", str(files), "--sizes", "P=1,M=2", "--sizes", "P=3, M=4", "--json")
    facts = {Path(each["file"]).name: each["diagnostics"] for each in json.loads(twice.stdout)["files"]}
    assert [one["code"] for one in facts["wrong.sched"]] == ["S501"]
    assert "P = 3" in str(facts["wrong.sched"])
    assert facts["right.sched"] == []
    assert "note: plans" not in twice.stderr
    plans = ROOT / "examples" / "04_plan"
    assert f"--sizes: {plans}" in schedc("check", str(plans), "--sizes", "P=4,M=8").stderr
    unknown = schedc("check", str(files), "--sizes", "Q=3")
    assert (unknown.exit_code, unknown.stdout) == (1, "2 files, 2 with findings\n")
    for arguments, said in (
        (["--sizes", "P"], "--sizes P=8,M=32"),
        (["--sizes", "P=2", "-D", "M=4"], "without --sizes"),
    ):
        result = schedc("check", str(files), *arguments)
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_library_name_means_its_schedule_beside_a_folder_of_that_name(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    (files / "below").rename(files / "1f1b")
    assert schedc("check", "1f1b").exit_code == 0
    assert schedc("check", "./1f1b").exit_code == 1


def test_a_file_named_like_the_library_is_the_file(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    (files / "zbv").write_text(WRONG, encoding="utf-8")
    facts = json.loads(schedc("check", "./zbv", "right.sched", "--json").stdout)
    assert [[one["code"] for one in each["diagnostics"]] for each in facts["files"]] == [["S501"], []]


def test_annotations_stand_at_the_places_of_findings(files: Path) -> None:
    wrong = files / "below" / "wrong.sched"
    for arguments in ([str(files)], [str(wrong)]):  # a folder, and one file
        result = schedc("check", *arguments, "--format", "github")
        (line,) = result.stdout.splitlines()
        head, _, text = line.partition("::")[2].partition("::")
        assert head == f"error title=S501 a claim does not hold,file={wrong},line=8,col=3,endLine=8,endColumn=27"
        assert text.startswith("the claim `bubble == (P-1)*F` does not hold%0Anote: counterexample: ")
        assert "%0Ahelp: correct the claim" in text
        assert result.exit_code == 1
    assert schedc("check", "1f1b", "--format", "github").stdout == ""


def test_places_are_seen_from_the_root_of_the_repository(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / ".git").mkdir()
    monkeypatch.chdir(files / "below")
    for given in (".", "wrong.sched", str(files / "below" / "wrong.sched")):
        assert ",file=below/wrong.sched,line=8," in schedc("check", given, "--format", "github").stdout
        (run,) = json.loads(schedc("check", given, "--format", "sarif").stdout)["runs"]
        place = run["results"][0]["locations"][0]["physicalLocation"]
        assert place["artifactLocation"] == {"uri": "below/wrong.sched"}
        assert json.loads(schedc("check", given, "--json").stdout)["schema"].startswith("schedc.check")


def test_sarif_has_every_finding_with_a_rule_that_explains_it() -> None:
    figures = sarif()
    assert (figures["failed"], figures["wrong"]) == (0, [])
    assert figures["cases"] >= figures["files"] >= 16
    deadlock = ROOT / "examples" / "mistakes" / "short_warmup.sched"
    (run,) = json.loads(schedc("check", str(deadlock), "--format", "sarif").stdout)["runs"]
    assert [label["message"]["text"] for label in run["results"][0]["relatedLocations"]] == ["rank 1 stands here"]
    empty = json.loads(schedc("check", "1f1b", "--format", "sarif").stdout)
    assert empty["runs"][0]["results"] == []


@needs("sarif", "jsonschema_rs")
def test_the_published_schema_takes_every_log_and_refuses_broken_ones() -> None:
    assert {name: published_faults(log) for name, log in logs().items() if published_faults(log)} == {}
    for field, value in (("ruleIndex", "0"), ("message", {}), ("level", "fatal"), ("place", 1)):
        log = json.loads(json.dumps(logs()["mistakes"]))
        log["runs"][0]["results"][0][field] = value
        assert len(published_faults(log)) == 1, field


@pytest.mark.parametrize("text", ["", "\n", "sched 1", "sched 1\n\n", WRONG.rstrip()[:-1], WRONG.rstrip()[:-1] + "\n"])
def test_a_place_where_something_is_missing_lies_in_the_text(files: Path, text: str) -> None:
    path = files / "short.sched"
    path.write_text(text, encoding="utf-8")
    (run,) = json.loads(schedc("check", str(path), "--format", "sarif").stdout)["runs"]
    places = [each["physicalLocation"] for result in run["results"] for each in result["locations"]]
    assert places
    assert all(map(lies_inside, places))


def test_a_text_that_is_no_schedule_has_one_finding(files: Path) -> None:
    result = schedc("check", str(files / "notes.md"))
    assert result.exit_code == 2
    assert "notes.md is no .sched file" in result.stderr
    assert "1 finding;" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.sched", "1f1b"], "there is no file or folder nowhere.sched, 1f1b"),
        (["right.sched", "below", "-D", "P=3", "--floor"], "--define, --floor: give one schedule"),
        (["right.sched", "--json", "--format", "sarif"], "ask for one of them"),
        (["right.sched", "--sweep", "P<=3", "--format", "github"], "--format github is priced at one size"),
        (["empty"], "there is no .sched file in empty"),
    ],
)
def test_what_does_not_go_together_is_refused(
    files: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(files)
    (files / "empty").mkdir()
    result = schedc("check", *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_hooks_call_commands_that_take_files() -> None:
    hooks = needed("yaml").safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {hook["id"] for hook in hooks} == {"schedc-check", "schedc-fmt"}
    for hook in hooks:
        program, command = hook["entry"].split()
        assert (program, hook["language"]) == ("schedc", "python")
        assert command in COMMANDS
