"""The invariants of what works lead through: activations between device and host, parameters and sums of replicas."""

from __future__ import annotations

from enum import Enum

import numpy as np

from schedc.diagnostics import Diagnostic
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import WEIGHT
from schedc.ir.ops import FACTS as OP_FACTS
from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind
from schedc.ir.program_table import SHOWN, START, ProgramTable
from schedc.ir.works import WorkGroup, WorkKind


class State(Enum):
    """Where the activations of a microbatch are, or the parameters of a stage, or how far a sum of gradients is."""

    NOWHERE = "not there yet"
    DEVICE = "on the device"
    LEAVING = "on the way to the host"
    HOST = "on the host"
    BACK = "on the way back"
    DONE = "no longer needed"

    SHARDED = "sharded"
    COMING = "on the way"
    WHOLE = "whole"
    GOING = "being dropped"

    LOCAL = "not summed"
    SCATTERING = "on the way in parts"
    IN_PARTS = "summed in parts"
    SPREADING = "on the way as a whole"


_MOVES = {
    WorkKind.OFFLOAD: (State.DEVICE, State.LEAVING, State.HOST),
    WorkKind.FETCH: (State.HOST, State.BACK, State.DEVICE),
    WorkKind.GATHER: (State.SHARDED, State.COMING, State.WHOLE),
    WorkKind.DROP: (State.WHOLE, State.GOING, State.SHARDED),
    WorkKind.SCATTER: (State.LOCAL, State.SCATTERING, State.IN_PARTS),
    WorkKind.SPREAD: (State.IN_PARTS, State.SPREADING, State.LOCAL),
}
"""The states before a work, between START and JOIN, and after the work."""
_OF_PARAMETERS = (WorkKind.GATHER, WorkKind.DROP)
_AMONG_REPLICAS = (*_OF_PARAMETERS, WorkKind.SCATTER, WorkKind.SPREAD)
_AT_REST = (State.SHARDED, State.LOCAL)

_Half = tuple[InstructionKind, WorkKind]


def _moves(half: _Half) -> tuple[State, State]:
    """The state that the START or JOIN of a work finds, and the one that it leaves."""
    found, between, left = _MOVES[half[1]]
    return (found, between) if half[0] == START else (between, left)


def places_of_activations(table: ProgramTable) -> list[Diagnostic]:
    """S331: activations leave after their forward, and are back before the next op that reads them."""
    found: list[Diagnostic] = []
    for events in _events(table).values():
        place = State.NOWHERE
        for row, event in sorted(events, key=lambda item: item[0]):
            needed, after = _moves(event) if isinstance(event, tuple) else _op_moves(event, place)
            if place is not needed:
                what = "moves" if isinstance(event, tuple) else "reads"
                message = f"this instruction {what} activations that are {place.value}, not {needed.value}"
                help = "offload behind the forward, fetch in front of the backward, and join the fetch before it"
                found.append(table.finding("S331", row, message, help=help))
                break
            place = after
        if len(found) == SHOWN:
            break
    return found


def _op_moves(kind: OpKind, place: State) -> tuple[State, State]:
    """Where an op needs the activations, and where it leaves them. A W reads what its I has left on the device."""
    if kind is OpKind.F:
        return State.NOWHERE, State.DEVICE
    if kind is OpKind.W:
        return place, place
    return State.DEVICE, State.DONE if OP_FACTS[kind].backward else State.DEVICE


_Event = OpKind | _Half


def _events(table: ProgramTable) -> dict[tuple[int, int], list[tuple[int, _Event]]]:
    """Rows and what they do with the activations of each stage and microbatch that works move."""
    program, works = table.program, table.program.works
    rows = np.flatnonzero((program.work >= 0) & (program.microbatch >= 0))
    events: dict[tuple[int, int], list[tuple[int, _Event]]] = {}
    for row in rows.tolist():
        slot = int(program.stage[row]), int(program.microbatch[row])
        kind = WorkKind(int(works.kind[program.work[row]]))
        events.setdefault(slot, []).append((row, (InstructionKind(int(program.kind[row])), kind)))
    schedule, op_row = table.computation
    slots = schedule.stage.astype(np.int64) * program.microbatches + schedule.microbatch
    moved = np.isin(slots, [stage * program.microbatches + microbatch for stage, microbatch in events])
    for op in np.flatnonzero(moved).tolist():
        slot = int(schedule.stage[op]), int(schedule.microbatch[op])
        events[slot].append((int(op_row[op]), OpKind(int(schedule.kind[op]))))
    return events


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
    rows = rows[np.isin(works.kind[program.work[rows]], _AMONG_REPLICAS)]
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
    parameters = State.SHARDED
    sums: dict[tuple[WorkGroup, int], State] = {}
    number = _numbers(table, rows)
    for row in sorted({*rows, *(uses if gathered else [])}):
        if program.work[row] < 0:
            if parameters is not State.WHOLE:
                message = f"the instruction reads parameters that are {parameters.value}"
                return table.finding("S331", row, message, help="join the gather of the stage in front of it")
            continue
        work = works.work(int(program.work[row]))
        half = InstructionKind(int(program.kind[row])), work.kind
        total = work.group, number[int(program.work[row])]
        state = parameters if work.kind in _OF_PARAMETERS else sums.get(total, State.LOCAL)
        needed, after = _moves(half)
        if state is not needed:
            what = f"finds what stage {stage} has {state.value}, not {needed.value}"
            order = "gather, drop" if work.kind in _OF_PARAMETERS else "scatter, spread"
            return table.finding("S331", row, f"this instruction {what}", help=f"the order of works is {order}")
        if work.kind in _OF_PARAMETERS:
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
        return "the instruction sums gradients that are not complete"
    if number > 1 and (number > 2 or copies.size or not (reduced < row).any()):
        return "this instruction sums gradients again"
    return ""
