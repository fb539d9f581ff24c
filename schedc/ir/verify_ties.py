"""The invariants of tied weights in a `Program`: every two copies exchange their gradients once, when complete."""

from __future__ import annotations

from collections import Counter

import numpy as np

from schedc.diagnostics import Diagnostic
from schedc.ir.op_tables import WEIGHT
from schedc.ir.program_table import REDUCE, SHOWN, ProgramTable
from schedc.ir.ties import TiedExchange, copies_of, exchanges_of, lies_apart


def tied_stages(table: ProgramTable) -> list[Diagnostic]:
    """S303: every tie has two or more ascending stages that exist, and the placement allows it."""
    program = table.program
    for tie in program.tied:
        stages = " and ".join(map(str, tie.stages))
        ascending = all(low < high for low, high in zip(tie.stages, tie.stages[1:], strict=False))
        if len(tie.stages) < 2 or not ascending or not 0 <= tie.stages[0] <= tie.stages[-1] < program.stages:
            message = f"the tied stages {stages} are no two ascending ones in 0 ..< {program.stages}"
            return [Diagnostic("S303", message, source=program.source)]
        if program.placement.pipes > 1 and lies_apart(tie, program.placement):
            message = f"the stages {stages} are tied, have two copies each, and do not share their ranks"
            return [Diagnostic("S303", message, source=program.source)]
    return []


def tied_sums(table: ProgramTable) -> list[Diagnostic]:
    """S318: the copies of every tie exchange their gradients, each two once, after their last weight gradients."""
    program, rows = table.program, table.rows(REDUCE)
    rows = rows[program.stage2[rows] >= 0]
    schedule, op_row = table.computation
    weights = np.flatnonzero(WEIGHT[schedule.kind])
    ties = program.tied if weights.size else ()
    expected = Counter(end for tie in ties for end in exchanges_of(tie, program.placement))
    columns = (program.rank, program.stage, program.peer, program.stage2)
    present = [TiedExchange(*(int(column[row]) for column in columns)) for row in rows]
    for exchange, times in [*Counter(present).items(), *((end, 0) for end in expected.keys() - set(present))]:
        if times != expected[exchange]:
            message = (
                f"rank {exchange.rank} sums the weights of stage {exchange.stage} that are tied to stage"
                f" {exchange.peer_stage} {times} times with rank {exchange.peer} instead of {expected[exchange]}"
            )
            return [Diagnostic("S318", message, source=program.source)]
    last = np.full((program.ranks, program.stages), -1)
    last[schedule.rank[weights], schedule.stage[weights]] = op_row[weights]
    needed = {
        (copy.rank, copy.stage): int(last[copy.rank, list(copy.stages)].max())
        for tie in ties
        for copy in copies_of(tie, program.placement)
    }
    early = [int(row) for row, end in zip(rows, present, strict=True) if row < needed[end.rank, end.stage]]
    return [
        table.finding("S318", row, f"the weights of stage {program.stage[row]} are not complete here")
        for row in early[:SHOWN]
    ]
