"""A folder of plans is written whole or not at all, and plan files find their waterfalls in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedc.diagnostics import DiagnosticError
from schedc.report.plan_files import load_plan_facts
from schedc.report.plan_folder import plan_file, write_folder
from support.plan_facts import search_facts
from support.written_plans import written_plans


def fill(text: str = "one"):  # type: ignore[no-untyped-def]
    def write(folder: Path) -> None:
        (folder / plan_file(1)).write_text(text)
        (folder / "plans.json").write_text("{}")

    return write


def broken(folder: Path) -> None:
    (folder / plan_file(1)).write_text("half")
    raise KeyboardInterrupt


def codes(error: pytest.ExceptionInfo[DiagnosticError]) -> list[str]:
    return [diagnostic.code for diagnostic in error.value.diagnostics]


def test_a_folder_is_written_whole(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "plans"
    write_folder(folder, False, fill())
    assert sorted(path.name for path in folder.iterdir()) == ["01.sched", "plans.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["plans"]


@pytest.mark.parametrize("forced", [False, True])
def test_a_folder_stays_as_it_was_where_writing_ends_early(tmp_path: Path, forced: bool) -> None:
    folder = tmp_path / "plans"
    if forced:
        write_folder(folder, False, fill())
    with pytest.raises(KeyboardInterrupt):
        write_folder(folder, forced, broken)
    assert [path.name for path in tmp_path.iterdir()] == (["plans"] if forced else [])
    if forced:
        assert (folder / "01.sched").read_text() == "one"


def test_plans_are_written_over_only_by_force(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    write_folder(folder, False, fill())
    (folder / "02.sched").write_text("of a longer search")
    with pytest.raises(DiagnosticError) as error:
        write_folder(folder, False, fill("two"))
    assert codes(error) == ["S750"]
    assert (folder / "01.sched").read_text() == "one"
    write_folder(folder, True, fill("two"))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"01.sched": "two", "plans.json": "{}"}
    assert [path.name for path in tmp_path.iterdir()] == ["plans"]


@pytest.mark.parametrize("stranger", ["notes.txt", "mine.sched", ".git/config"])
def test_files_of_somebody_else_are_never_written_over(tmp_path: Path, stranger: str) -> None:
    path = tmp_path / "plans" / stranger
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(DiagnosticError, match=stranger.split("/")[0]) as error:
        write_folder(tmp_path / "plans", True, fill())
    assert codes(error) == ["S750"]
    assert path.read_text() == "mine"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    with pytest.raises(DiagnosticError) as error:
        write_folder(tmp_path / "plans", True, fill())
    assert codes(error) == ["S750"]


def test_a_plan_file_finds_its_waterfall(tmp_path: Path) -> None:
    search, plan = load_plan_facts(written_plans(tmp_path / "plans") / "02.sched")
    assert (search["schema"], plan["file"]) == ("schedc.plans", "02.sched")


def test_a_plan_that_was_edited_has_none(tmp_path: Path) -> None:
    folder = written_plans(tmp_path / "plans")
    costs, plan = folder / "01.costs.toml", folder / "02.sched"
    costs.write_text(costs.read_text().replace("p2p = ", "p2p = 1"))
    plan.write_text(plan.read_text().replace("recompute chunk 0 layer", "recompute chunk 0 full"))
    for path in (folder / "01.sched", plan):
        with pytest.raises(DiagnosticError, match="was changed since") as error:
            load_plan_facts(path)
        assert codes(error) == ["S751"]
    costs.unlink()
    with pytest.raises(DiagnosticError, match=r"no 01\.costs\.toml lies beside it"):
        load_plan_facts(folder / "01.sched")


def _spoilt(facts: dict[str, object], what: str, value: object) -> str:
    facts["plans"][0][what] = value  # type: ignore[index]
    return json.dumps(facts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no plans.json"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\ud800", "is not JSON"),
        ("[]", "not written by a search"),
        ('{"schema": "schedc.list"}', "not written by a search"),
        ('{"schema": "schedc.plans"}', "does not name it"),
        ('{"schema": "schedc.plans", "plans": [3, {"file": "09.sched"}]}', "does not name it"),
        (_spoilt(search_facts(), "waterfall", []), "has no waterfall"),
        (_spoilt(search_facts(), "waterfall", [{"what": "ideal", "seconds": "long"}]), "has no waterfall"),
        (_spoilt(search_facts(), "waterfall", [{"what": 3, "seconds": 1}]), "has no waterfall"),
        (_spoilt(search_facts(), "step_s", float("nan")), "has no waterfall"),
        (_spoilt(search_facts(), "memory", 3), "has no waterfall"),
        (_spoilt(search_facts(), "axes", None), "has no waterfall"),
    ],
)
def test_a_plan_file_without_waterfall_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    (tmp_path / "01.sched").write_text("a plan")
    if text is not None:
        (tmp_path / "plans.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DiagnosticError, match=why) as error:
        load_plan_facts(tmp_path / "01.sched")
    assert codes(error) == ["S751"]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match="no such file"):
        load_plan_facts(tmp_path / "01.sched")
