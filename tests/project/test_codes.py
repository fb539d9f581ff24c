"""Every diagnostic code that the compiler can emit is explained, and its examples do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedc.codes import CODES, ENTRIES, FAMILIES
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.planner.cluster.read import load_cluster
from schedc.planner.fit.rows import load_rows
from schedc.planner.model.read import load_model
from support.paths import ROOT


def emitted_codes() -> set[str]:
    files = [*(ROOT / "schedc").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]
    texts = [f.read_text(encoding="utf-8") for f in files if f.parent.name != "codes"]
    return {code for text in texts for code in re.findall(r"\"(S\d{3})\"", text)}


def test_every_emitted_code_is_explained_and_every_explained_code_is_emitted() -> None:
    assert emitted_codes() == set(CODES)
    assert all(code[:2] in FAMILIES for code in CODES)


def test_no_code_means_two_things() -> None:
    assert [code.code for code in ENTRIES] == list(CODES)


def findings(text: str, tmp_path: Path, file: str) -> list[str]:
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    try:
        if file == "cluster.toml":
            load_cluster(path)
        elif file == "config.json":
            load_model(path)
        elif file == "rows.csv":
            (tmp_path / "cluster.toml").write_text(CODES["S705"].right, encoding="utf-8")
            load_rows(path)
        else:
            return [diagnostic.code for diagnostic in analyse(path, {}).diagnostics]
        return []
    except DiagnosticError as error:
        return [diagnostic.code for diagnostic in error.diagnostics]


@pytest.mark.slow
@pytest.mark.parametrize("code", [c for c in CODES.values() if c.wrong], ids=lambda c: c.code)
def test_the_wrong_example_raises_the_code_and_the_right_one_nothing(code, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert code.wrong != code.right, f"{code.code}: one file twice; are `right` and `wrong` swapped?"
    assert code.code in findings(code.wrong, tmp_path, code.file), f"{code.code}: `wrong` does not raise it"
    assert findings(code.right, tmp_path, code.file) == [], f"{code.code}: `right` is not right"
