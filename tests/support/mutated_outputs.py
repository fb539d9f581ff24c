"""Breaks outputs at one place: drops a field that must be there, or gives a value another type."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from schedc.schemas.shapes import outputs
from support.commands import schedc
from support.outputs import faults, validator

COMMAND_LINES = (
    ("check", "zbv", "-D", "P=2", "-D", "M=4", "--floor"),
    ("compare", "1f1b", "zbv", "-D", "P=2", "-D", "M=4"),
    ("diff", "1f1b", "zbh1", "-D", "P=2", "-D", "M=4"),
    ("frontier", "-D", "P=2", "-D", "M=4"),
    ("layout", "Et*3|tt,noop|tt|ttL"),
    ("list",),
    ("plan", "list"),
    ("plan", "show", "deepseek-v3", "h800", "-D", "devices=2048"),
    ("tune", "1f1b", "-D", "P=2", "-D", "M=4", "--effort", "0.05"),
    ("export", "examples/04_plan/parts.sched", "--to", "json"),
)
"""Commands whose outputs are broken; all but the last print with `--json`."""

Path = tuple[str | int, ...]

_VALUES: tuple[Any, ...] = (None, True, 7, 0.5, "x", [], [None], {}, {"x": None})


def _kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place inside a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield (*path, key)
        yield from _places(each, (*path, key))


def _mutated(facts: dict[str, Any], path: Path, draw: random.Random, required: bool) -> dict[str, Any]:
    """The output with one place broken: dropped where it is required, or of another type."""
    copy = deepcopy(facts)
    inside: Any = copy
    for key in path[:-1]:
        inside = inside[key]
    if required and draw.random() < 0.5:
        del inside[path[-1]]
        return copy
    inside[path[-1]] = draw.choice([value for value in _VALUES if _kind(value) != _kind(inside[path[-1]])])
    return copy


def _required_at(name: str, path: Path) -> bool:
    """Whether the table has this field of the output itself, and demands it."""
    if len(path) > 1:
        return False
    return path[0] in ("schema", "version") or any(
        field.name == path[0] and not field.optional for field in outputs()[name].fields
    )


def broken(facts: dict[str, Any], count: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """So many mutated outputs; places near the top are as likely as those in long lists."""
    by_depth: dict[int, list[Path]] = {}
    for path in _places(facts):
        by_depth.setdefault(len(path), []).append(path)
    for _ in range(count):
        path = draw.choice(by_depth[draw.choice(list(by_depth))])
        yield _mutated(facts, path, draw, _required_at(facts["schema"], path))


def schemas(cases: int = 10_000) -> dict[str, Any]:
    """The word of `benchmarks/door.py`. cases: outputs with a fault."""
    draw, wrong, accepted, tried = random.Random(0), list[str](), 0, 0
    for line in COMMAND_LINES:
        facts = json.loads(schedc(*line, *(() if "--to" in line else ("--json",))).stdout)
        wrong += faults(facts)
        judge = validator(facts["schema"], closed=False)
        for one in broken(facts, cases // len(COMMAND_LINES), draw):
            tried += 1
            accepted += judge.is_valid(one)
    failed = len(wrong) + (accepted > tried / 100)
    return {
        "cases": len(COMMAND_LINES) + tried,
        "failed": failed,
        "outputs": len(COMMAND_LINES),
        "mutated": tried,
        "accepted": accepted,
        "refused_pct": 100.0 * (1 - accepted / tried),
        "schemas": len(outputs()),
        "wrong": wrong,
    }
