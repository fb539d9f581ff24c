"""Plans, and the JSON and columns that former releases made of them when the plan of a program was a text."""

from __future__ import annotations

import zipfile
from functools import cache

from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from support.paths import ROOT

with zipfile.ZipFile(ROOT / "tests" / "data" / "old_programs.zip") as _archive:
    STORED = {name: _archive.read(name) for name in _archive.namelist()}
"""By name: ``NAME.sched``, ``NAME.json`` and ``NAME.npz``."""

NAMES = sorted({name.partition(".")[0] for name in STORED})


@cache
def planned_json() -> tuple[str, ...]:
    """JSON of today of every stored program that has a plan."""
    programs = [load_program(STORED[f"{name}.npz"], name) for name in NAMES]
    return tuple(text for program in programs if '"plan"' in (text := program_to_json(program)))
