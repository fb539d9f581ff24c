"""What segments and exchanges of a model take on this machine: from the trace of a step to the [cell] table of a cost
file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from schedc.cell.costs import CellCosts, Times
from schedc.cell.program import Action, Half
from schedc_runtime.cells import Part
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.executor import Interval
from schedc_runtime.trace import Intervals

_MILLISECOND = 1e6
_HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)


def measured_cell_costs(steps: Iterable[Intervals]) -> CellCosts:
    """Times in milliseconds by role, the median over layers, microbatches, ranks and steps.

    steps: of each traced step, the intervals by rank (`Pipeline.trace`), run with the order
    `schedc_runtime.cells.serial`: an exchange that is waited for at once takes from its start to the end of its wait.
    In that time it also waits for slower ranks of its group. Raises `RuntimeFault` for steps of another order.

    The attention behind another MoE layer also ends that layer; only those that begin a stage are counted.
    """
    taken: dict[tuple[str, Half], list[float]] = defaultdict(list)
    moved: dict[tuple[str, Half], list[float]] = defaultdict(list)
    for intervals in steps:
        for spans in intervals.values():
            started: Interval | None = None
            for interval in spans:
                if (part := Part.parse(interval.part)) is None:
                    continue
                if started is not None and part.action is not Action.WAIT:
                    raise RuntimeFault("costs are measured with one exchange after the other", "pass cells=serial")
                begin = interval.start if started is None else started.start
                time = (interval.end - begin) / _MILLISECOND
                started = interval if part.action is Action.START else None
                if part.action is Action.RUN and (part.role != "attention" or part.layer == 0):
                    taken[part.role, part.half].append(time)
                elif part.action is Action.WAIT:
                    moved[part.role, part.half].append(time)
    if not taken:
        raise RuntimeFault("the traced steps have no cells", "only stages with expert layers, or with overlap=True, do")
    return CellCosts.of(_times(taken), _times(moved))


def _times(found: dict[tuple[str, Half], list[float]]) -> dict[str, Times]:
    """The median of each role and half; a half that never ran takes no time."""
    roles = dict.fromkeys(role for role, _ in found)
    return {role: Times(*(median(found.get((role, half), [0.0])) for half in _HALVES)) for role in roles}
