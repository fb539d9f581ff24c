"""Writes torch's lowered CSV: computation, messages, gathers of parameters and reductions of gradients.

`torch.distributed.pipelining`'s _PipelineScheduleRuntime reads it with ``format="compute_comms"``. A line has the
actions of one rank in order: ``0UNSHARD,0F0,0SEND_F0,…,1RECV_B0,0B0,…,0REDUCE_GRAD,0RESHARD``. The messages come from
our `Program`, in its global order. So the file also runs if a send completes only with its receive.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from schedc.interchange.refusals import one_copy, only_exported_ops
from schedc.interchange.torch_cells import MESSAGES
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import WEIGHT
from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.schedule import Schedule
from schedc.plan.price_cells import communicated
from schedc.step.costs.costs import Costs

GATHERED = 3
"""Most stages whose gathered parameters a rank holds at one time: the current one and the next two, as in torch."""


def export(schedule: Schedule, costs: Costs) -> str:
    """The target ``csv-lowered``; see `to_lowered_csv`."""
    one_copy(schedule.placement, "torch's lowered CSV", schedule.source)  # before the messages are made
    return to_lowered_csv(communicated(schedule, costs)[0])


def to_lowered_csv(program: Program) -> str:
    """The lowered order of every rank; ends with a newline. Raises `DiagnosticError`: S603 for two copies of a
    stage, S609 for an order with Rs, S615 for pairs with a W.

    SEND stands behind what it sends and RECV where the Program posts it; torch waits for a message by itself.
    UNSHARD comes before the first use of a stage and again after a RESHARD. A RESHARD makes room for the stages that
    are used sooner. REDUCE_GRAD comes behind the last weight gradient of a stage. All three do nothing without FSDP.
    """
    one_copy(program.placement, "torch's lowered CSV", program.source)
    schedule, row = computation(program)
    only_exported_ops(schedule, "torch's lowered CSV")
    texts = _texts(program)
    before, after = _of_stages(schedule, row)
    lines = []
    for start, stop in pairwise(program.rank_start.tolist()):
        cells: list[str] = []
        for index in range(start, stop):
            cells += before.get(index, ())
            if texts[index]:
                cells.append(texts[index])
            cells += after.get(index, ())
        lines.append(",".join(cells) + "\n")
    return "".join(lines)


def _texts(program: Program) -> list[str]:
    """[instructions] the cell of each instruction; empty for WAIT, which torch does by itself."""
    texts = [""] * len(program)
    for kind in (*map(InstructionKind, OpKind), InstructionKind.CELL):
        for index in np.flatnonzero(program.kind == kind).tolist():
            texts[index] = _compute(program, index)
    for word, (kind, channel, step) in MESSAGES.items():
        rows = np.flatnonzero((program.kind == kind) & (program.channel == channel))
        stages, numbers = (program.stage[rows] + step).tolist(), program.microbatch[rows].tolist()
        for index, stage, microbatch in zip(rows.tolist(), stages, numbers, strict=True):
            texts[index] = f"{stage}{word.name}{microbatch}"
    return texts


def _compute(program: Program, index: int) -> str:
    """The text of an op or a pair."""
    texts = [f"{stage}{kind.name}{microbatch}" for kind, stage, microbatch in program.instruction(index).ops]
    return texts[0] if len(texts) == 1 else f"({';'.join(texts)})OVERLAP_F_B"


def _of_stages(schedule: Schedule, row: Int64) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """The cells for whole stages: before each row of the program, and after each row.

    row: [ops] row of the program that runs each op; the two ops of a pair have the same row.
    """
    before: dict[int, list[str]] = {}
    after: dict[int, list[str]] = {}
    weights = WEIGHT[schedule.kind]
    last = {int(stage): int(index) for stage, index in zip(schedule.stage[weights], row[weights], strict=True)}
    for stage, index in last.items():
        after.setdefault(index, []).append(f"{stage}REDUCE_GRAD")
    for start, stop in pairwise(schedule.rank_start.tolist()):
        if start == stop:
            continue
        rows, stages = row[start:stop].tolist(), schedule.stage[start:stop].tolist()
        held: list[int] = []
        for index, wanted in _windows(rows, stages):
            evicted = [stage for stage in held if stage not in wanted]
            fetched = [stage for stage in wanted if stage not in held]
            held = [stage for stage in held if stage in wanted] + fetched
            if evicted or fetched:
                before[index] = [f"{stage}RESHARD" for stage in evicted] + [f"{stage}UNSHARD" for stage in fetched]
        after.setdefault(rows[-1], []).extend(f"{stage}RESHARD" for stage in held)
    return before, after


def _windows(rows: list[int], stages: list[int]) -> list[tuple[int, list[int]]]:
    """For every cell: its row, and at most `GATHERED` stages that it and the next cells use, soonest first."""
    soonest: list[int] = []  # all stages of the rank, the one used next in front
    windows: list[tuple[int, list[int]]] = []
    for row, stage in zip(reversed(rows), reversed(stages), strict=True):
        soonest = [stage, *(later for later in soonest if later != stage)]
        if windows and windows[-1][0] == row:
            windows.pop()
        windows.append((row, soonest[:GATHERED]))
    return windows[::-1]
