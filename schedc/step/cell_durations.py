"""The times of a schedule's cells under costs, and classes of cells that take equally long whatever the costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats, Int32, Int64, bincount, distinct
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import OpCosts, StageCosts
from schedc.step.dependencies import Dependencies
from schedc.step.durations import alone, duration
from schedc.step.kept import kept


class SameKinds(NamedTuple):
    """Cells of the same kinds of ops. cells: [n], in order. rows: of each of their ops, [n] its row of the costs."""

    first: OpKind
    second: OpKind | None
    cells: Int64
    rows: tuple[Int32, ...]


def durations_of(groups: Sequence[SameKinds], costs: OpCosts) -> Floats:
    """[cells] or [cells, K] times of all cells of the groups, without recomputation inside of backwards."""
    result = np.empty((sum(group.cells.size for group in groups), *costs.F.shape[1:]))
    for first, second, cells, rows in groups:
        result[cells] = duration(costs, first, second, rows)
    return result


def alike_durations(dependencies: Dependencies, costs: StageCosts) -> Floats:
    """[cells] times of all cells where all microbatches cost the same, with recomputation inside of backwards."""
    result = durations_of(cell_groups(dependencies, costs.F.size), costs)
    last = dependencies.backward
    cells = np.flatnonzero(last >= 0)
    result[cells] += recomputing(dependencies.schedule, costs)[last[cells]]
    return result


def single_ops(schedule: Schedule, costs: StageCosts) -> Floats:
    """[ops] the time of each op alone, of a microbatch of factor 1."""
    return np.asarray(alone(costs)[schedule.kind, schedule.stage]) + recomputing(schedule, costs)


def recomputing(schedule: Schedule, costs: StageCosts) -> Floats:
    """[ops] how long each op recomputes inside itself: a backward whose microbatch has no R."""
    if not costs.recompute_in_backward.any():
        return np.zeros(len(schedule))
    inside = BACKWARD[schedule.kind] & ~recomputed_ops(schedule)
    return np.where(inside, costs.recompute_in_backward[schedule.stage], 0.0)


@kept
def cell_groups(dependencies: Dependencies, rows: int) -> tuple[SameKinds, ...]:
    """Every cell by its kinds of ops. rows: number of rows of the costs: a row per stage, or a row for all."""
    return _groups(dependencies, rows, slice(None))


@kept
def cell_classes(dependencies: Dependencies, rows: int) -> tuple[tuple[SameKinds, ...], Int64]:
    """One cell of each class, grouped, and [cells] the class of each cell; cells of a class take equally long.

    rows: number of rows of the costs, as in `cell_groups`. With one row each group is a class.
    """
    kind, row, kinds = dependencies.schedule.kind, _rows(dependencies, rows).astype(np.int64), len(OpKind)
    code = kind[dependencies.first] * np.int64(rows) + row[dependencies.first]
    pairs = np.flatnonzero(dependencies.pairs)
    one, other = dependencies.first[pairs], dependencies.second[pairs]
    # behind the classes of single ops: pairs with an I, pairs with a B, then an F with a W and an I with a W
    weight = (np.int64(2) + kind[one]) * rows + row[one]
    way = np.where(kind[other] == OpKind.W, weight, 2 * row[one] + (kind[other] == OpKind.B))
    code[pairs] = (kinds + way) * rows + row[other]
    values, classes = distinct(code, kinds * rows + 4 * rows * rows)
    some = np.empty(values.size, np.int64)
    some[classes] = np.arange(len(dependencies))
    return _groups(dependencies, rows, some), classes


def _groups(dependencies: Dependencies, rows: int, some: Int64 | slice) -> tuple[SameKinds, ...]:
    kind, row, kinds = dependencies.schedule.kind, _rows(dependencies, rows), len(OpKind)
    first, second = dependencies.first[some], dependencies.second[some]
    code = kind[first] + kinds * np.where(second < 0, 0, kind[second] + np.int64(1))
    groups = []
    for number in np.flatnonzero(bincount(code)).tolist():
        cells = np.flatnonzero(code == number)
        pair = OpKind(number // kinds - 1) if number >= kinds else None
        ops = (first,) if pair is None else (first, second)
        groups.append(SameKinds(OpKind(number % kinds), pair, cells, tuple(row[op[cells]] for op in ops)))
    return tuple(groups)


def _rows(dependencies: Dependencies, rows: int) -> Int32:
    """[ops] the row of costs of each op: its stage, or 0."""
    stage = dependencies.schedule.stage
    return stage if rows > 1 else np.zeros_like(stage)
