"""Journeys of calls through folders, on a package of three functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project.journey import TASKS, called, travelled
from project.room_order import ROOMS
from support.paths import ROOT


def test_a_journey_counts_each_function_once_and_only_inside_of_the_package(tmp_path: Path) -> None:
    texts = {
        "top.py": "def whole():\n  for _ in range(3):\n    middle(); leaf()\n  last()\ndef last(): sorted([2, 1])\n",
        "mid/middle.py": "def middle():\n    leaf(); other()\ndef other(): pass\n",
        "low/leaf.py": "def leaf(): pass\n",
    }
    names: dict[str, Any] = {}
    for name, text in texts.items():
        exec(compile(text, str(tmp_path / name), "exec"), names)
    folders = called(names["whole"], tmp_path)
    assert folders == ["top", "mid", "low", "mid", "top"]
    journey = travelled(folders, ("low", "mid", "top"))
    assert journey == (("top", "mid", "low", "mid", "top"), 2)


def test_a_text_with_a_plan_goes_through_few_folders(tmp_path: Path) -> None:
    run = TASKS["compile:source"](tmp_path)
    run()
    journey = travelled(called(run, ROOT / "schedc"), ROOMS["schedc"])
    assert len(journey.folders) <= 43
    assert journey.climbs <= 20


def test_functions_of_one_folder_are_one_stay() -> None:
    assert travelled(["a", "a", "b", "b", "face", "a"], ("a", "b")) == (("a", "b", "face", "a"), 2)
    assert travelled([], ("a",)) == ((), 0)
