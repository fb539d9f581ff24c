"""A rank that loads a program of today, and trains with it, imports nothing that reads the language of schedules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from support.old_programs import STORED

TRAINED = """
import sys
from schedc_runtime.commands import run
status = run.main(sys.argv[1:])
parsers = ("syntax", "check", "elaborate", "load", "draw", "compiler")
print(status, sorted(name for name in sys.modules if name.startswith("schedc.") and name.split(".")[1] in parsers))
"""


@pytest.mark.slow
def test_a_rank_parses_no_text(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text(program_to_json(load_program(STORED["sliced.npz"], "sliced.npz")))
    options = ["--program", str(path), "--in-process", "--steps", "1", "--width", "8", "--tokens", "4"]
    ran = subprocess.run([sys.executable, "-c", TRAINED, *options], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 []"
