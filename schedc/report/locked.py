"""Figures of schedules at sizes and costs, kept in a file. A check names the figures that a change has moved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from schedc.compiler import analyse
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.units import equations

TABLE = "figures"
"""The table of the file, once for each schedule at sizes and costs."""
_COLUMNS = ("rank_start", "kind", "stage", "microbatch", "pair")


@dataclass(frozen=True)
class LockedCase:
    """A schedule as commands name it, at sizes, under costs as ``--cost`` takes them."""

    schedule: str
    sizes: Mapping[str, int]
    costs: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = ", ".join(filter(None, (equations(self.sizes), *self.costs)))
        return f"{self.schedule} at {at}" if at else self.schedule

    @property
    def key(self) -> tuple[str, tuple[tuple[str, int], ...], tuple[str, ...]]:
        """Equal for cases that are the same."""
        return self.schedule, tuple(sorted(self.sizes.items())), self.costs


Locked = tuple[LockedCase, dict[str, Any]]
"""A case with its figures by name."""


def locked_figures(case: LockedCase) -> Locked:
    """The case at all its sizes, and its figures. Raises `DiagnosticError` where the schedule is not legal."""
    step = analyse(case.schedule, case.sizes, Costs.from_options(case.costs))
    told = {
        "makespan": round(step.timeline.makespan, 9),
        "bubble_ratio": round(step.timeline.bubble_ratio, 12),
        "peak_activations": step.memory.peak_activations.tolist(),
        "claims": [f"{claim.claim}: {claim.status}" for claim in step.claims],
        "order": _digest(step.schedule),
    }
    return LockedCase(case.schedule, dict(step.schedule.sizes), case.costs), told


def _digest(schedule: Schedule) -> str:
    """A digest of which rank runs which op when."""
    columns = (np.asarray(getattr(schedule, name), np.int64).tobytes() for name in _COLUMNS)
    return sha256(b"|".join(columns)).hexdigest()[:16]


def moved_figures(case: LockedCase, kept: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure that is another one now."""
    for name in now:
        if kept.get(name) != now[name]:
            yield f"{case}: {name} was {_shown(kept.get(name))}, is {_shown(now[name])}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else "missing" if value is None else str(value)


def to_toml(rows: Iterable[Locked]) -> str:
    """The text of the file: a table for each case."""
    parts = ["# Written by `schedc lock`, and compared by `schedc lock --diff`."]
    for case, told in rows:
        values = {"schedule": case.schedule, "costs": case.costs, **told}
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        parts.append("\n".join([f"[[{TABLE}]]", f"sizes = {{{equations(case.sizes)}}}", *lines]))
    return "\n\n".join(parts) + "\n"


def from_toml(document: Mapping[str, Any]) -> list[Locked]:
    """The cases of a parsed file. Raises ValueError for one that `to_toml` does not write."""
    rows = document.get(TABLE)
    if not isinstance(rows, list):
        raise ValueError(f"it has no table [[{TABLE}]]")
    return [_row(row) for row in rows]


def _row(row: Any) -> Locked:
    match row:
        case {"schedule": str(schedule), "sizes": dict(sizes), "costs": list(costs), **told} if all(
            type(value) is int for value in sizes.values()
        ) and all(isinstance(cost, str) for cost in costs):
            return LockedCase(schedule, sizes, tuple(costs)), {str(name): value for name, value in told.items()}
    raise ValueError(f"a table [[{TABLE}]] needs the texts schedule and costs, and whole numbers in sizes")
