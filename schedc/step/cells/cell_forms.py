"""The cells of a schedule by form: cells of one kind on equal graphs share a form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.cell.graph import StageShape
from schedc.cell.program import HALVES
from schedc.ir.arrays import Int64, bincount
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept


@dataclass(frozen=True)
class CellForm:
    """Cells of one kind whose stages have equal graphs.

    stages: the stages of the forward and of the backward in one such cell (the same twice for a cell of one op).
    count: how many the schedule has. forward, backward: the graphs of both halves, None where there is no such half.
    """

    kind: str
    stages: tuple[int, int]
    count: int
    forward: StageShape | None
    backward: StageShape | None


@dataclass(frozen=True, eq=False)
class CellForms:
    """The forms of a schedule's cells. form: [cells] index into ``forms``."""

    forms: tuple[CellForm, ...]
    form: Int64


@kept
def cell_forms(
    dependencies: Dependencies, shapes: tuple[StageShape, ...], recomputed: tuple[StageShape, ...]
) -> CellForms:
    """The forms of the cells of a schedule.

    shapes: [stages] graphs, marked with the nodes that a backward without an R recomputes.
    recomputed: [stages] graphs, marked with the nodes that an R recomputes.
    """
    graphs = tuple(_Graphs(*row) for row in zip(shapes, recomputed, strict=True))
    uses = _uses(dependencies.schedule)
    codes, form = np.unique(_codes(dependencies, graphs, uses), return_inverse=True)
    representative = np.zeros(codes.size, np.int64)
    representative[form[::-1]] = np.arange(len(dependencies))[::-1]
    counts = bincount(form, minlength=codes.size)
    forms = tuple(
        _form(dependencies, cell, count, graphs, uses)
        for cell, count in zip(representative.tolist(), counts.tolist(), strict=True)
    )
    return CellForms(forms, form.astype(np.int64))


class _Graphs(NamedTuple):
    """The graphs of a stage: ``plain`` for most cells, ``recomputed`` for its Rs."""

    plain: StageShape
    recomputed: StageShape

    def of(self, use: int) -> StageShape:
        return (self.plain, self.plain.ready, self.recomputed)[use]


def _uses(schedule: Schedule) -> Int64:
    """[ops] graph that an op runs: 0 the plain one, 1 the ready one of a backward behind an R, 2 that of an R."""
    behind = recomputed_ops(schedule) & BACKWARD[schedule.kind]
    return np.where(schedule.kind == OpKind.R, 2, behind.astype(np.int64))


def _codes(dependencies: Dependencies, graphs: Sequence[_Graphs], uses: Int64) -> Int64:
    """[cells] a number for the kind of each cell and the graphs of its stages; of W, B and I the first is unused."""
    numbers: dict[StageShape, int] = {}
    number = np.array([[numbers.setdefault(of.of(use), len(numbers)) for use in range(3)] for of in graphs], np.int64)
    return _numbered(dependencies, number, len(numbers), uses)


def _numbered(dependencies: Dependencies, number: Int64, numbers: int, uses: Int64) -> Int64:
    """[cells] a number for the kind of each cell and the numbers of its graphs. number: [stages, uses] of a graph."""
    schedule, kinds = dependencies.schedule, len(OpKind)
    code = schedule.kind * np.int64(numbers) + number[schedule.stage, uses]
    first, second = dependencies.first, dependencies.second
    behind = np.where(second >= 0, 1 + code[second], 0)
    return np.asarray(code[first] * (1 + kinds * numbers) + behind)


class OpOnStage(NamedTuple):
    """An op of a cell. kind: its letter. ready: whether its backward recomputes nothing, since an R did."""

    kind: str
    stage: int
    ready: bool


@dataclass(frozen=True, eq=False)
class StageForms:
    """The cells of a schedule by their ops and stages, whatever the graphs. form: [cells] index into ``forms``."""

    forms: tuple[tuple[OpOnStage, ...], ...]
    form: Int64


@kept
def stage_forms(dependencies: Dependencies) -> StageForms:
    """The ops and stages that the cells of a schedule have."""
    schedule, uses = dependencies.schedule, _uses(dependencies.schedule)
    stages = schedule.stages
    number = np.arange(3 * stages).reshape(stages, 3)
    _, cells, form = np.unique(
        _numbered(dependencies, number, 3 * stages, uses), return_index=True, return_inverse=True
    )
    rows = zip(dependencies.first[cells].tolist(), dependencies.second[cells].tolist(), strict=True)
    forms = tuple(tuple(_op(schedule, uses, row) for row in pair if row >= 0) for pair in rows)
    return StageForms(forms, form.astype(np.int64))


def _op(schedule: Schedule, uses: Int64, row: int) -> OpOnStage:
    return OpOnStage(LETTERS[schedule.kind[row]], int(schedule.stage[row]), bool(uses[row] == 1))


def _form(dependencies: Dependencies, cell: int, count: int, graphs: Sequence[_Graphs], uses: Int64) -> CellForm:
    schedule = dependencies.schedule
    first, second = int(dependencies.first[cell]), int(dependencies.second[cell])
    kind = LETTERS[schedule.kind[first]] + (LETTERS[schedule.kind[second]] if second >= 0 else "")
    last = second if second >= 0 else first
    stages = int(schedule.stage[first]), int(schedule.stage[last])
    on_first, on_second = HALVES[kind]
    forward = graphs[stages[0]].of(int(uses[first])) if on_first else None
    backward = graphs[stages[1]].of(int(uses[last])) if on_second else None
    return CellForm(kind, stages, count, forward, backward)
