"""Plans for tests: files with lines of one."""

from __future__ import annotations

from pathlib import Path

MOE = "layers 4  experts 64 top 8  topology nodes 2 x 4"
"""Lines of a plan whose experts two nodes share."""


def written(folder: Path, lines: str, head: str = "1f1b(P = 2, M = 4)") -> str:
    path = folder / "x.sched"
    path.write_text(f"plan a = {head} {{\n  {lines}\n}}\n", encoding="utf-8")
    return str(path)
