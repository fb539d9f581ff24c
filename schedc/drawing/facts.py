"""The figures of a schedule as words, which every view puts beside its picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.drawing.markup import quantity
from schedc.ir.schedule import Schedule
from schedc.step.memory import Memory
from schedc.step.timeline import Timeline

INSIDE = "times from inside cells, on the rank of the expert group that ends last"
"""What a drawing with copies of experts says of its times."""


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


def weighted(memory: Memory) -> bool:
    """Whether the costs give activations a size, so that memory differs from their number."""
    return not np.array_equal(memory.memory_inside, memory.activations_inside)


def _range(values: npt.NDArray[Any]) -> str:
    low, high = quantity(float(values.min())), quantity(float(values.max()))
    return low if low == high else f"{low} to {high}"
