"""The invariants of works among replicas: ops read whole parameters, and sums take complete gradients."""

from __future__ import annotations

from enum import Enum

import numpy as np

from schedc.diagnostics import Diagnostic
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import WEIGHT
from schedc.ir.program import InstructionKind
from schedc.ir.program_table import SHOWN, ProgramTable
from schedc.ir.works import WorkGroup, WorkKind

START, JOIN = InstructionKind.START, InstructionKind.JOIN
_Half = tuple[InstructionKind, WorkKind]


class ParameterState(Enum):
    """Where the parameters of a sharded stage are."""

    SHARDED = "sharded"
    COMING = "on the way"
    WHOLE = "whole"
    GOING = "being dropped"


class SumState(Enum):
    """How far the sum of a stage's gradients over its replicas is."""

    LOCAL = "not summed"
    SCATTERING = "on the way in parts"
    IN_PARTS = "summed in parts"
    SPREADING = "on the way as a whole"


State = ParameterState | SumState

_PARAMETERS: dict[_Half, tuple[State, State]] = {
    (START, WorkKind.GATHER): (ParameterState.SHARDED, ParameterState.COMING),
    (JOIN, WorkKind.GATHER): (ParameterState.COMING, ParameterState.WHOLE),
    (START, WorkKind.DROP): (ParameterState.WHOLE, ParameterState.GOING),
    (JOIN, WorkKind.DROP): (ParameterState.GOING, ParameterState.SHARDED),
}
"""Where a work finds the parameters of its stage, and where it leaves them."""

_SUMS: dict[_Half, tuple[State, State]] = {
    (START, WorkKind.SCATTER): (SumState.LOCAL, SumState.SCATTERING),
    (JOIN, WorkKind.SCATTER): (SumState.SCATTERING, SumState.IN_PARTS),
    (START, WorkKind.SPREAD): (SumState.IN_PARTS, SumState.SPREADING),
    (JOIN, WorkKind.SPREAD): (SumState.SPREADING, SumState.LOCAL),
}
"""Where a work finds the sum of its stage and group, and where it leaves it."""

_AT_REST = (ParameterState.SHARDED, SumState.LOCAL)
_KINDS = {kind for _, kind in (*_PARAMETERS, *_SUMS)}


def states_of_stages(table: ProgramTable) -> list[Diagnostic]:
    """S331: every op of a gathered stage finds whole parameters, and every sum is complete behind all gradients.

    Parameters are sharded at the begin and at the end of every stream. A second sum of a stage and group is that of
    tied weights, and starts behind their REDUCE.
    """
    findings: list[Diagnostic] = []
    for (rank, stage), rows in _rows_by_stage(table).items():
        if finding := _walk(table, rank, stage, rows):
            findings.append(finding)
        if len(findings) == SHOWN:
            break
    return findings


def _rows_by_stage(table: ProgramTable) -> dict[tuple[int, int], list[int]]:
    """The rows of works among replicas, by rank and stage."""
    program, works = table.program, table.program.works
    rows = np.flatnonzero(program.work >= 0)
    rows = rows[np.isin(works.kind[program.work[rows]], [int(kind) for kind in _KINDS])]
    by_stage: dict[tuple[int, int], list[int]] = {}
    for row, rank, stage in zip(rows.tolist(), program.rank[rows].tolist(), program.stage[rows].tolist(), strict=True):
        by_stage.setdefault((rank, stage), []).append(row)
    return by_stage


def _walk(table: ProgramTable, rank: int, stage: int, rows: list[int]) -> Diagnostic | None:
    """The first fault of a stage on a rank. rows: those of its works."""
    program, works = table.program, table.program.works
    uses, trained = _ops_of(table, rank, stage)
    reduced = np.flatnonzero((program.kind == InstructionKind.REDUCE) & (program.stage == stage))
    reduced = reduced[program.rank[reduced] == rank]
    gathered = any(works.kind[program.work[row]] == WorkKind.GATHER for row in rows)
    parameters: State = ParameterState.SHARDED
    sums: dict[tuple[WorkGroup, int], State] = {}
    number = _numbers(table, rows)
    for row in sorted({*rows, *(uses if gathered else [])}):
        if program.work[row] < 0:
            if parameters is not ParameterState.WHOLE:
                message = f"this instruction reads parameters that are {parameters.value}"
                return table.finding("S331", row, message, help="join the gather of the stage in front of it")
            continue
        work = works.work(int(program.work[row]))
        half = InstructionKind(int(program.kind[row])), work.kind
        total = work.group, number[int(program.work[row])]
        state = parameters if half in _PARAMETERS else sums.get(total, SumState.LOCAL)
        needed, after = (_PARAMETERS | _SUMS)[half]
        if state is not needed:
            what = f"finds what stage {stage} has {state.value}, not {needed.value}"
            order = "gather, drop" if half in _PARAMETERS else "scatter, spread"
            return table.finding("S331", row, f"this instruction {what}", help=f"the order of works is {order}")
        if half in _PARAMETERS:
            parameters = after
            continue
        sums[total] = after
        fault = _early(total[1], row, trained, reduced[program.stage2[reduced] < 0], reduced)
        if half == (START, WorkKind.SCATTER) and fault:
            return table.finding("S331", row, fault, help="sum gradients behind the last one of their stage")
    left = [state for state in (parameters, *sums.values()) if state not in _AT_REST]
    return table.finding("S331", rows[-1], f"at the end, what stage {stage} has is {left[0].value}") if left else None


def _ops_of(table: ProgramTable, rank: int, stage: int) -> tuple[list[int], int]:
    """Rows of the ops of a stage on a rank, and the last one that computes a weight gradient; -1 for none."""
    schedule, op_row = table.computation
    low, high = schedule.rank_start[rank : rank + 2].tolist()
    ops = low + np.flatnonzero(schedule.stage[low:high] == stage)
    trained = op_row[ops[WEIGHT[schedule.kind[ops]]]]
    return op_row[ops].tolist(), int(trained.max(initial=-1))


def _numbers(table: ProgramTable, rows: list[int]) -> dict[int, int]:
    """The number of each work of a stage among those of its kind and group, from 1."""
    counts: dict[tuple[WorkKind, WorkGroup], int] = {}
    numbers: dict[int, int] = {}
    for work in sorted(set(table.program.work[rows].tolist())):
        of = table.program.works.work(work)
        numbers[work] = counts[of.kind, of.group] = counts.get((of.kind, of.group), 0) + 1
    return numbers


def _early(number: int, row: int, trained: int, copies: Int64, reduced: Int64) -> str:
    """What is wrong with the place of a SCATTER; empty for nothing.

    number: it is the so-and-so-many-th of its stage and group. trained: row of the last weight gradient. copies,
    reduced: rows of the REDUCEs of copies of the stage, and of all its REDUCEs.
    """
    if row < trained or (copies > row).any():
        return "this instruction sums gradients that are not complete"
    if number > 1 and (number > 2 or copies.size or not (reduced < row).any()):
        return "this instruction sums gradients again"
    return ""
