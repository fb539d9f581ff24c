"""Words of `benchmarks/door.py` that need little: rows of comparisons, edits of findings, tests of adapters."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from schedc.load.library import names
from support.commands import facts_of, json_of
from support.fix_cases import TEXTS, fixed
from support.paths import ROOT


def compared_rows(cases: int = 12) -> dict[str, Any]:
    """Comparisons of the whole library. cases: how many."""
    draw, rows, wrong = random.Random(0), 0, []
    for _ in range(cases):
        sizes = (f"P={draw.randint(2, 6)}", f"M={draw.choice((4, 8, 12, 16))}")
        costs = (f"p2p={draw.choice((0, 0.02, 0.1))}", f"W={draw.choice((0.5, 1, 1.5))}")
        asked = [word for pair in (*(("-D", s) for s in sizes), *(("--cost", c) for c in costs)) for word in pair]
        for row in json_of("compare", *names(), *asked)["schedules"]:
            if row["refused"] is None:
                rows += 1
                wrong += [] if is_checked(row) else [f"{' '.join(asked)}: {row['title']}"]
    return {"cases": rows, "failed": len(wrong), "comparisons": cases, "wrong": wrong}


def is_checked(row: dict[str, Any]) -> bool:
    """Whether a row has the figures of `schedc check` by its command, which counts in chunks."""
    checked, chunks = facts_of(*row["command"].split()[1:]), row["per_rank"]
    pairs = ((row["makespan"], checked["makespan"]), (row["memory"], max(checked["peak_memory"])))
    return all(math.isclose(own * chunks, other, rel_tol=1e-9) for own, other in pairs)


def fixes() -> dict[str, Any]:
    found = [case for name, text in TEXTS.items() for case in fixed(name, text)]
    wrong = [f"{case.name}: {case.code}" for case in found if not case.right]
    return {"cases": len(found), "failed": len(wrong), "codes": len({case.code for case in found}), "wrong": wrong}


def adapters() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        tests = ["tests/runtime/trainers", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        whole = {**os.environ, "SCHEDC_SWEEP": "full"}
        subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=whole, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"cases": len(cases) - skipped, "failed": len(wrong), "skipped": skipped, "wrong": wrong}
