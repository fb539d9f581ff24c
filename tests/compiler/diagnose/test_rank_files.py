"""Traces of this runtime as one file per rank: joined as if one file had all ranks, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from support.synthetic_traces import World, by_rank, schedule_at, write_steps

Documents = dict[str, dict[str, Any]]


def run(folder: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["diagnose", str(folder), "--json", *more])


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Three steps of four ranks, a file each; rank 2 is slow, and each rank begins at a time of its own."""
    world = World(slow=lambda rank, *_: 1.5 if rank == 2 else 1.0, late=lambda rank: 0.3 * rank, noise=0.01)
    write_steps(tmp_path / "whole", schedule_at("1f1b", P=4, M=4), world, steps=3)
    return tmp_path / "whole"


def split(whole: Path) -> Documents:
    return by_rank(json.loads(path.read_text()) for path in sorted(whole.iterdir()))


def written(found: Documents, folder: Path) -> Path:
    folder.mkdir()
    for name, document in found.items():
        (folder / name).write_text(json.dumps(document))
    return folder


def test_files_of_ranks_say_what_files_of_steps_say(whole: Path, tmp_path: Path) -> None:
    found = split(whole)
    assert len(found) == 12
    backwards = {f"{100 - place}{name}": found[name] for place, name in enumerate(found)}
    wanted = json.loads(run(whole).stdout)
    told = json.loads(run(written(backwards, tmp_path / "ranks")).stdout)
    assert told["causes"][0]["cause"] == "rank 2 = others"
    assert [cause["cause"] for cause in told["causes"]] == [cause["cause"] for cause in wanted["causes"]]
    for mine, theirs in zip(told["causes"], wanted["causes"], strict=True):
        assert mine["gain"] == pytest.approx(theirs["gain"], abs=1e-4)
    assert told["measured_ms"] == pytest.approx(wanted["measured_ms"], rel=1e-6)


def test_a_file_of_a_rank_may_have_several_steps(whole: Path, tmp_path: Path) -> None:
    found, joined = split(whole), {}
    for rank in range(4):
        files = [found[f"rank-{rank}-step-{step}.json"] for step in range(3)]
        first = files[0]["baseTimeNanoseconds"]
        events = [
            event | {"args": {"step": step}, "ts": event["ts"] + (file["baseTimeNanoseconds"] - first) / 1000}
            for step, file in enumerate(files)
            for event in file["traceEvents"]
        ]
        joined[f"rank-{rank}.json"] = files[0] | {"traceEvents": events}
    told, wanted = (json.loads(run(each).stdout) for each in (written(joined, tmp_path / "ranks"), whole))
    assert told["steps"] == wanted["steps"] == 3
    assert told["causes"][0]["gain"] == pytest.approx(wanted["causes"][0]["gain"], abs=1e-4)


def _facts(name: str, **facts: Any) -> Callable[[Documents], None]:
    return lambda found: found[name]["otherData"].update(facts)


def _without(*names: str) -> Callable[[Documents], None]:
    def change(found: Documents) -> None:
        for name in names:
            del found[name]

    return change


def _again(found: Documents) -> None:
    found["again.json"] = found["rank-1-step-2.json"]


def _other_rank_inside(found: Documents) -> None:
    found["rank-1-step-0.json"]["traceEvents"][3]["pid"] = 2


def _all_ranks(found: Documents) -> None:
    del found["rank-1-step-0.json"]["otherData"]["rank"]


def _no_clock(found: Documents) -> None:
    del found["rank-1-step-0.json"]["baseTimeNanoseconds"]


def _another_clock(found: Documents) -> None:
    for step in range(3):
        found[f"rank-1-step-{step}.json"]["baseTimeNanoseconds"] += 50_000_000


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (_without(*(f"rank-2-step-{step}.json" for step in range(3))), "S616", "no file is of rank 2 of 4"),
        (_without("rank-2-step-1.json"), "S616", "rank 0 has step 11, and no file has it of rank 2"),
        (_without("rank-0-step-1.json"), "S616", "rank 1 has step 11, and no file has it of rank 0"),
        (_again, "S616", "rank 1 has step 12 in"),
        (_facts("rank-1-step-0.json", program="3d4c"), "S616", "rank 1 ran another program in step 10 than rank 0"),
        (_facts("rank-1-step-0.json", schedule="zbv"), "S616", "rank 1 ran zbv, rank 0 ran 1f1b"),
        (_facts("rank-1-step-0.json", ranks=8), "S616", "of a pipeline of 8 ranks"),
        (_facts("rank-1-step-0.json", replica=1), "S616", "of replica 1"),
        (_facts("rank-1-step-0.json", rank=4), "S616", "rank 4 of 4"),
        (_facts("rank-1-step-0.json", rank="1"), "S616", "`rank` '1'"),
        (_facts("rank-1-step-0.json", step=None), "S616", "`step` None"),
        (_other_rank_inside, "S616", "the file of rank 1, and has instructions of rank 2"),
        (_all_ranks, "S616", "a file of all ranks, and"),
        (_no_clock, "S616", "without a clock that ranks share"),
        (_another_clock, "S618", "ms before the message"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    change: Callable[[Documents], None], code: str, words: str, whole: Path, tmp_path: Path
) -> None:
    found = split(whole)
    change(found)
    refused = run(written(found, tmp_path / "changed"))
    assert refused.exit_code == 2, refused.output
    assert code in refused.stderr
    assert words in refused.stderr.replace("\n", " ")


def test_ranks_in_files_without_facts_are_told_how_to_save_them(whole: Path, tmp_path: Path) -> None:
    found = split(whole)
    for document in found.values():
        document["otherData"] = {"schedule": "1f1b"}
    refused = run(written(found, tmp_path / "plain"))
    assert refused.exit_code == 2
    assert "save_trace" in refused.stderr
