"""Measures what commands print: the words `tune` and `page` of `benchmarks/frontier.py`.

`tune`: searches with a bound on what they may give. A row has failed if its order is longer, its own bound lower, or a
proof is missing. Each found order is written, and `schedc check` prices the file anew.

`page`: `schedc frontier` at P = 8 and M = 32, by time and size of its page. A point has failed if its figures times v
are not those of its own `schedc check`.
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from click.testing import CliRunner

from schedc.cli import main

_NEAR = 1e-6
PAGE_SECONDS, PAGE_BYTES = 20.0, 1_000_000
"""Most that the page may take."""


class SearchRow(NamedTuple):
    """A search. most: makespan that it may give. least: bound that it must give. proven: whether by a proof."""

    arguments: str
    most: float
    least: float = 0.0
    proven: bool = False


_SPLIT = "hanayo -D P=8 -D M=24 -D w=2 --split --memory"
_WAVE = "zb_wave -D P=8 -D M=32 -D w=2 --memory 8"
_WORK = 384  # of a rank of this wave, in chunks
ROWS = (
    SearchRow("vhalf -D P=8 -D M=16", 113, 113, True),
    SearchRow("vhalf -D P=5 -D M=10", 71, 71, True),
    SearchRow("vmin -D P=8 -D M=16 --memory 4", 121, 119),
    SearchRow("hanayo -D P=4 -D M=12 -D w=2 --split --memory 3", 151, 151, True),
    SearchRow(f"{_SPLIT} 5", 316, 307),
    SearchRow(f"{_SPLIT} 6", 303, 303, True),
    SearchRow(f"{_SPLIT} 7", 299, 299, True),
    SearchRow(f"{_SPLIT} 4", 336, 319),
    SearchRow(f"{_WAVE} --cost p2p=0.1", _WORK + 4 * 4.33),
    SearchRow(f"{_WAVE} --cost I=1.2 --cost W=0.8", _WORK + 4 * 3.25),
    SearchRow(f"{_WAVE} --cost I=1.2 --cost W=0.8 --cost p2p=0.1", _WORK + 4 * 5.03),
)
"""The brief's table. The unit of a wave's costs is a chunk: four of them are a microbatch of a rank."""


def measured_searches(seconds: float, seeds: int) -> dict[str, Any]:
    """The figures of `tune`. seconds: of each search. seeds: searches of each row."""
    rows = [_searched(row, seconds, seed) for row in ROWS for seed in range(seeds)]
    return {"cases": len(rows), "failed": sum(row["failed"] for row in rows), "rows": rows}


def searched_order(arguments: str, seconds: float, seed: int) -> tuple[dict[str, Any], float]:
    """What `schedc tune` says of a search, with its makespan, and that of the written order by `schedc check`."""
    with tempfile.TemporaryDirectory() as folder:
        file, words = Path(folder) / "found.order", arguments.split()
        search = ["--time", f"{seconds:g}", "--workers", "2", "--seed", str(seed), "-o", str(file)]
        facts = _facts("tune", *words, *search)
        costs = [each for pair in pairwise(words) if pair[0] == "--cost" for each in pair]
        return {**facts, "makespan": facts["found"]["makespan"]}, _facts("check", str(file), *costs)["makespan"]


def _searched(row: SearchRow, seconds: float, seed: int) -> dict[str, Any]:
    facts, checked = searched_order(row.arguments, seconds, seed)
    found = facts["makespan"]
    missed = (
        found > row.most + _NEAR or facts["lower_bound"] < row.least - _NEAR or (row.proven and not facts["proven"])
    )
    differs = abs(checked - found) > _NEAR
    return {"command": f"schedc tune {row.arguments}", "seed": seed, "found": found, "most": row.most,
            "bound": facts["lower_bound"], "least_bound": row.least, "proven": facts["proven"],
            "checked": checked, "failed": bool(missed or differs)}  # fmt: skip


def measured_page() -> dict[str, Any]:
    """The figures of `page`. failed: points with other figures than their command's, and limits that were missed."""
    began = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "frontier.html"
        facts = _facts("frontier", "-D", "P=8", "-D", "M=32", "-o", str(file))
        seconds, size = perf_counter() - began, file.stat().st_size
    wrong = [point["command"] for point in facts["points"] if not _as_checked(point)]
    missed = [seconds > PAGE_SECONDS, size > PAGE_BYTES]
    return {
        "cases": len(facts["points"]) + len(missed),
        "failed": len(wrong) + sum(missed),
        "points": len(facts["points"]),
        "seconds": round(seconds, 1),
        "bytes": size,
        "examples": wrong[:5],
    }


def _as_checked(point: dict[str, Any]) -> bool:
    """Whether a point has the figures of its command, divided by its stages per rank."""
    checked, v = _facts(*point["command"].split()[1:]), point["per_rank"]
    bubble = min(checked["bubble"]) / v  # the busiest rank's
    return abs(bubble - point["bubble"]) < _NEAR and abs(max(checked["peak_memory"]) / v - point["memory"]) < _NEAR


def _facts(*arguments: str) -> dict[str, Any]:
    """What a command prints with `--json`."""
    result = CliRunner().invoke(main, [*arguments, "--json"])
    if result.exit_code not in (0, 1) or not isinstance(result.exception, SystemExit | None):
        raise RuntimeError(f"schedc {' '.join(arguments)}: {result.output}")
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts
