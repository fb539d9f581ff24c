"""The figures of a schedule as words, which every view puts beside its picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.drawing.markup import quantity
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import NAMES
from schedc.step.memory import Memory
from schedc.step.timeline import Timeline

ALWAYS = ("F", "I", "W")
"""Costs that every view names, also the defaults."""
INSIDE = ("times", "from inside cells, on the rank of the expert group that ends last")
"""Name and value of what a drawing with copies of experts says of its times."""


def figures(schedule: Schedule, timeline: Timeline, memory: Memory) -> dict[str, str]:
    """The figures by which schedules are compared, by name, in the order in which views show them.

    Times are in time units of the costs, memory in their unit of memory.
    """
    pipes = schedule.placement.pipes
    facts = {
        "ranks": str(schedule.ranks),
        "stages": str(schedule.stages),
        **({"pipes": str(pipes)} if pipes > 1 else {}),
        "microbatches": str(schedule.microbatches),
        "ops": str(len(schedule)),
        "makespan": quantity(timeline.makespan),
        "bubble per rank": _range(timeline.bubble),
        "bubble ratio": f"{100 * timeline.bubble_ratio:.1f} %",
        "span bubble ratio": f"{100 * timeline.span_bubble_ratio:.1f} %",
        "peak activations": _range(memory.peak_activations),
    }
    return {**facts, "peak memory": _range(memory.peak_memory)} if weighted(memory) else facts


def costs_json(costs: Costs) -> dict[str, float | list[float]]:
    """The costs of ops and messages by key: `ALWAYS`, and what is not the default; lists have a value per stage."""
    default = Costs()
    given = {key: getattr(costs, key) for key in NAMES}
    told = {key: value for key, value in given.items() if key in ALWAYS or value != getattr(default, key)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()}


def origin_of(costs: Costs, inside: bool = False) -> tuple[tuple[str, str], ...]:
    """(name, value) of what the times of a drawing are from. inside: whether the times are from inside cells."""
    return (INSIDE if inside else ("costs", costs_text(costs_json(costs))),)


def costs_text(given: Mapping[str, float | list[float]]) -> str:
    """``F = I = 1, W = 0.5``: the costs of `costs_json` in a few words."""
    keys: dict[str, list[str]] = {}
    for key, value in given.items():
        keys.setdefault("by stage" if isinstance(value, list) else f"{value:g}", []).append(key)
    return ", ".join(
        f"{', '.join(names)} {value}" if value == "by stage" else " = ".join([*names, value])
        for value, names in keys.items()
    )


def weighted(memory: Memory) -> bool:
    """Whether the costs give activations a size, so that memory differs from their number."""
    return not np.array_equal(memory.memory_inside, memory.activations_inside)


def _range(values: npt.NDArray[Any]) -> str:
    low, high = quantity(float(values.min())), quantity(float(values.max()))
    return low if low == high else f"{low} to {high}"
