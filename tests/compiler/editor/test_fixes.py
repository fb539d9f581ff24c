"""Edits that mend findings: the finding is gone, no other one comes, and `check --fix` writes the safe ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedc.codes import CODES
from schedc.editor.findings import findings
from schedc.fixes import fix_of
from schedc.source import Source
from support.commands import schedc
from support.fix_cases import LINEAR, TEXTS, fixed


def test_an_edit_ends_its_finding_and_begins_no_other() -> None:
    cases = [case for name, text in TEXTS.items() for case in fixed(name, text)]
    assert [case for case in cases if not case.right] == []
    mended = {case.code for case in cases}
    assert len(mended) >= 19, sorted(mended)
    assert {"S001", "S003", "S101", "S103", "S104", "S110", "S111", "S121", "S147", "S406"} <= mended


def test_check_writes_the_safe_edits_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.sched"
    wrong = LINEAR.replace("place linear", "place linera;").replace("repeat M - w", "repeat N - w")
    path.write_text(wrong.replace("{ B }", "{ I }"), encoding="utf-8")
    result = schedc("check", str(path), "--fix")
    assert path.read_text(encoding="utf-8") == LINEAR.replace("repeat M - w", "repeat N - w").replace("{ B }", "{ I }")
    assert result.stderr.count("fixed ") == 2
    assert "S101" in result.stderr
    path.write_text(LINEAR.replace("min(P-1-r", "mni(P-1-r"), encoding="utf-8")
    assert schedc("check", str(path), str(tmp_path), "--fix").exit_code == 0
    assert path.read_text(encoding="utf-8") == LINEAR
    assert "--fix writes into files: 1f1b is none" in schedc("check", "1f1b", "--fix").output


def test_a_word_that_may_mean_two_is_left_to_a_person(tmp_path: Path) -> None:
    two = LINEAR.replace("    phase warmup", "    let wb = 1\n    phase warmup").replace("let w = ", "let wa = ")
    path = tmp_path / "two.sched"
    path.write_bytes(two.replace("\n", "\r\n").encode())
    (tmp_path / "a.sched").write_bytes(b"\xff")
    (tmp_path / "z.sched").write_text(LINEAR.replace("linear", "linera"), encoding="utf-8")
    result = schedc("check", str(tmp_path), "--fix", "--json")
    assert f"left {path}:" in result.stderr
    assert "(an edit that may mean something else: " in result.stderr
    assert path.read_bytes() == two.replace("\n", "\r\n").encode()
    assert (tmp_path / "z.sched").read_text(encoding="utf-8") == LINEAR
    found = {Path(each["file"]).stem: each["diagnostics"] for each in json.loads(result.stdout)["files"]}
    assert [each["code"] for each in found["a"]] == ["S122"]
    assert next((each["fix"]["text"][0], each["fix"]["safe"]) for each in found["two"]) == ("w", False)
    assert found["z"] == []


def test_json_and_sarif_have_the_edit(tmp_path: Path) -> None:
    path = tmp_path / "mine.sched"
    path.write_text(CODES["S151"].wrong, encoding="utf-8")
    (finding,) = json.loads(schedc("check", str(path), "--json").stdout)["diagnostics"]
    fix = finding["fix"]
    assert (fix["title"], fix["text"], fix["safe"], fix["line"]) == ("write `hot 8`", "hot 8", False, finding["line"])
    (run,) = json.loads(schedc("check", str(path), "--format", "sarif").stdout)["runs"]
    (change,) = run["results"][0]["fixes"][0]["artifactChanges"][0]["replacements"]
    assert change["insertedContent"] == {"text": "hot 8"}
    assert change["deletedRegion"]["startColumn"] == fix["column"]


@pytest.mark.parametrize("name", ["S501", "S301"])
def test_what_a_person_has_to_choose_has_no_edit(name: str) -> None:
    assert [fix_of(each) for each in findings(Source("a.sched", CODES[name].wrong))] == [None]


def test_a_file_is_looked_at_once_and_after_each_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty slips are mended in one call, and the check of a folder takes the findings that are known."""
    (tmp_path / "slips.sched").write_text(LINEAR.replace("{ B }", "{ B ; }").replace(";", "; " * 60), encoding="utf-8")
    (tmp_path / "right.sched").write_text(LINEAR, encoding="utf-8")
    looked: list[str] = []
    monkeypatch.setattr(
        "schedc.editor.findings.findings", lambda source: looked.append(source.name) or findings(source)
    )
    result = schedc("check", str(tmp_path), "--fix")
    assert (result.exit_code, result.stderr.count("fixed ")) == (0, 60)
    assert [sum(Path(each).stem == name for each in looked) for name in ("right", "slips")] == [1, 61]
