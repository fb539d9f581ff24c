"""Reads off the walk of a step when copies of experts travel on one rank of the expert group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from schedc.cell.program import Action, Half, graph_of
from schedc.ir.arrays import Floats, Int32, Int64
from schedc.step.cells.cell_pricing import CellPricing
from schedc.step.cells.group_pricing import RankRows, price_group
from schedc.step.cells.played_cells import PlayedCell, blocked_at
from schedc.step.copy_runs import CopyColumns, CopyRuns


class CopyTask(NamedTuple):
    """An exchange of copies of a stage's layer. for_step: whether they last for the step."""

    half: Half
    layer: int
    for_step: bool


def copies_in_step(inside: CellPricing) -> CopyRuns | None:
    """The exchanges of copies in the step of `CellPricing.late_wait`; None where none takes time."""
    kept: list[tuple[Any, ...]] = []
    group, programs = inside.ranks or RankRows(np.ones((1, 1, 1)), ()), [of.program_on_ranks for of in inside.kinds]
    rank = price_group(
        inside.dependencies, programs, inside.kind, inside.costs, group, inside.p2p,
        works=inside.timed, walked=lambda *walk: kept.append(walk),
    ).rank  # fmt: skip
    ((played, form, base, values),) = kept
    cells = ((each, np.flatnonzero(form == number)) for number, each in enumerate(played))
    columns = (of for each, own in cells if own.size for of in _columns(each, own, base, values[:, [rank]], inside))
    return CopyRuns.of(columns, inside.late_wait)


def _columns(each: PlayedCell, own: Int64, base: Int32, values: Floats, inside: CellPricing) -> Iterator[CopyColumns]:
    """The exchanges of copies in cells of one form. own: [cells] these. values: [n, 1] of the rank that is shown."""
    dependencies, copies = inside.dependencies, _copies_of(each)
    schedule = dependencies.schedule
    second = np.where(dependencies.second >= 0, dependencies.second, dependencies.first)
    for action, task, *around in each.marks:
        if action is not Action.WAIT or task not in copies:
            continue
        copy = copies[task]
        clock, started, begin, end = (values[base[own] + step, 0] for step in around)
        blocked, waiting = blocked_at(clock, started, begin, end)
        ops = graph_of(each.tasks.tasks.kind, copy.half, dependencies.first, second)[own]
        microbatch = np.full(own.size, -1) if copy.for_step else schedule.microbatch[ops].astype(np.int64)
        of_layer = copy.layer, each.lanes[task], copy.half is Half.WEIGHT
        yield CopyColumns(
            *of_layer, schedule.stage[ops].astype(np.int64), microbatch, own, begin, end, blocked - waiting
        )


def _copies_of(each: PlayedCell) -> dict[int, CopyTask]:
    """By row of a form the exchanges of copies."""
    tasks = enumerate(zip(each.tasks.tasks.all, each.tasks.copied, strict=True))
    inside = {row: CopyTask(task.half, layer, False) for row, (task, layer) in tasks if layer >= 0}
    ahead = {row: CopyTask(Half.FORWARD, layer, True) for layer, row in each.out.items()}
    return inside | ahead | {row: CopyTask(Half.WEIGHT, layer, True) for layer, row in each.back.items()}
