"""Programs of versions 1 and 2, as former releases wrote them, are read to the programs that are compiled today.

`tests/data/old_programs.zip` has plans, and the JSON and columns that were made of them when `plan` was a text.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import schedc
from schedc.diagnostics import DiagnosticError
from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from schedc.ir.npz import program_to_npz
from support.paths import ROOT

with zipfile.ZipFile(ROOT / "tests" / "data" / "old_programs.zip") as _archive:
    STORED = {name: _archive.read(name) for name in _archive.namelist()}

NAMES = sorted({name.partition(".")[0] for name in STORED})


@pytest.mark.parametrize("name", NAMES)
def test_an_old_program_is_the_one_compiled_anew(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.sched").write_bytes(STORED[f"{name}.sched"])
    program = schedc.compile(Path(f"{name}.sched"))
    old = {form: load_program(STORED[f"{name}.{form}"], f"{name}.{form}") for form in ("json", "npz")}
    assert old == {"json": program, "npz": program}
    assert load_program(program_to_json(program), "new") == load_program(program_to_npz(program), "new") == program


def test_a_damaged_text_of_an_old_plan_is_refused_at_its_place() -> None:
    text = STORED["measured.json"].decode().replace("top 2", "top 99")
    with pytest.raises(DiagnosticError, match="the top 99 of 16 experts") as caught:
        load_program(text, "old.json")
    assert [finding.code for finding in caught.value.diagnostics] == ["S145"]


LOADED = """
import sys
from pathlib import Path
from schedc.ir.load import load_program
for file in sys.argv[1:]:
    load_program(Path(file).read_bytes(), file)
parsers = ("syntax", "check", "elaborate", "load", "draw", "claims", "compiler")
print(sorted(name for name in sys.modules if name.startswith("schedc.") and name.split(".")[1] in parsers))
"""


def test_a_program_of_today_is_loaded_without_the_language(tmp_path: Path) -> None:
    files = []
    for name in NAMES:
        program = load_program(STORED[f"{name}.npz"], name)
        (tmp_path / f"{name}.json").write_text(program_to_json(program))
        (tmp_path / f"{name}.npz").write_bytes(program_to_npz(program))
        files += [str(tmp_path / f"{name}.{form}") for form in ("json", "npz")]
    ran = subprocess.run([sys.executable, "-c", LOADED, *files], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
