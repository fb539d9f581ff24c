"""The typical mistakes in examples/mistakes: what `schedc check` says of each, and that the mended line is right.

``SCHEDC_UPDATE=1 pytest tests/project/test_mistakes.py`` writes the expected outputs anew. Read the outputs before a
commit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cli import main
from support.paths import ROOT

FOLDER = ROOT / "examples" / "mistakes"
MISTAKES = sorted(FOLDER.glob("*.sched"))
RIGHT = "# right: "


def mended(text: str) -> str:
    """The file with what stands behind ``# right:`` in place of the wrong line."""
    lines = text.splitlines()
    (wrong,) = (number for number, line in enumerate(lines) if RIGHT in line)
    lines[wrong] = lines[wrong].partition(RIGHT)[2]
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_is_told_as_written_down(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    result = CliRunner().invoke(main, ["check", path.name])
    output = result.output.replace(f"{FOLDER.parent.parent}/", "")  # where a library file is, on this machine
    expected = path.with_suffix(".txt")
    if os.environ.get("SCHEDC_UPDATE"):
        expected.write_text(output, encoding="utf-8")
    assert result.exit_code == 1
    assert output == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_the_line_that_is_called_right_is_right(path: Path, tmp_path: Path) -> None:
    file = tmp_path / path.name
    file.write_text(mended(path.read_text(encoding="utf-8")), encoding="utf-8")
    result = CliRunner().invoke(main, ["check", str(file)])
    assert (result.exit_code, "FAILS" in result.output) == (0, False), result.output


def test_every_mistake_has_its_output_and_they_are_of_many_kinds() -> None:
    outputs = sorted(FOLDER.glob("*.txt"))
    assert [path.stem for path in outputs] == [path.stem for path in MISTAKES]
    codes = {code for path in outputs for code in re.findall(r"error\[(S\d+)\]", path.read_text(encoding="utf-8"))}
    assert len(codes) >= 10
