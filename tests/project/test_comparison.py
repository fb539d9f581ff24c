"""The page about other tools: each cell has an answer and where it was seen, and what is named there exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from schedc.cli import main
from support.needs import TRAINERS, lacking
from support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "comparison.md").read_text(encoding="utf-8")
ANSWER = re.compile("(yes|no|partly|not tried|reported)([:,] |$)")
SEEN = re.compile(r"`schedc [^`]+`|`[\w./]+`: `[^`]+`|\[[^]]+\]\([^)]+\)")


class ComparedCell(NamedTuple):
    tool: str
    question: str
    answer: str
    seen: str


def cells() -> Iterator[ComparedCell]:
    for section in PAGE.split("\n## ")[1:]:
        for row in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
            yield ComparedCell(section.partition("\n")[0], *row.split(" | "))


CELLS = [*cells()]


def test_every_tool_has_an_answer_to_every_question() -> None:
    questions = [cell.question for cell in CELLS if cell.tool == "schedc"]
    tools = list(dict.fromkeys(cell.tool for cell in CELLS))
    assert [(cell.tool, cell.question) for cell in CELLS] == [(tool, each) for tool in tools for each in questions]
    for cell in CELLS:
        assert ANSWER.match(cell.answer), cell
        assert SEEN.search(cell.seen), cell


def test_the_versions_are_those_that_are_installed() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("torch", "torchtitan", "megatron-core"):
        assert f"\n\n{name} {pins[name]}\n\n" in PAGE
    assert len(re.findall(r"^commit [0-9a-f]{7} of ", PAGE, re.MULTILINE)) == 3


@pytest.mark.slow
def test_our_commands_show_what_they_are_there_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"`schedc ([^`]+)`", "".join(cell.seen for cell in CELLS if cell.tool == "schedc"))
    assert len(commands) == 7
    for line in commands:
        result = CliRunner().invoke(main, line.split())
        assert result.exit_code == 0, f"{line}\n{result.output}"


FOLDERS = {
    "torch.distributed.pipelining": ("torch", "distributed/pipelining"),
    "torchtitan": ("torchtitan", ""),
    "Megatron-Core": ("megatron", ""),
}


@pytest.mark.parametrize("tool", FOLDERS)
def test_names_in_other_tools_exist(tool: str) -> None:
    package, inside = FOLDERS[tool]
    if reason := lacking(package):
        pytest.skip(reason)
    spec = find_spec(package) if package == "torch" else None
    folder = (Path(spec.origin).parent if spec and spec.origin else TRAINERS / package) / inside
    named = [re.match("`([^`]+)`: `([^`]+)`", cell.seen) for cell in CELLS if cell.tool == tool]
    found = [match for match in named if match]
    assert len(found) >= 5
    for match in found:
        assert match[2] in (folder / match[1]).read_text(encoding="utf-8"), match[0]
