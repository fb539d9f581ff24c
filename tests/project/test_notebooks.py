"""Notebooks run when the site is built: outputs are those of Jupyter, and a cell that fails ends the build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generate.notebook_cells import run_cell
from generate.notebooks import EXAMPLES, page


def test_a_cell_shows_what_it_prints_and_its_last_value() -> None:
    names: dict[str, object] = {}
    assert run_cell("a = 2\nprint(a)\na + 1", names) == [("text", "2\n"), ("text", "3")]
    assert run_cell("a;", names) == run_cell("None", names) == run_cell("b = 1", names) == []
    drawn = run_cell("import schedc\nschedc.draw('zbv', P=2, M=4)", names)
    assert [form for form, _ in drawn] == ["html"]
    assert run_cell("!echo one\n!exit 3", names) == [("text", "one\n")]


def test_a_command_or_a_cell_that_fails_is_no_output() -> None:
    with pytest.raises(RuntimeError, match="no such order"):
        run_cell("!echo no such order; exit 1", {})
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0", {})


def test_a_notebook_that_fails_makes_no_page(tmp_path: Path) -> None:
    path = tmp_path / "wrong.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["import schedc\n", "schedc.draw('zbw')"]}]}))
    with pytest.raises(RuntimeError, match=r"wrong\.ipynb: (?s:.*)S121"):
        page(path)


def test_notebooks_are_kept_without_outputs() -> None:
    for path in (EXAMPLES / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.name
