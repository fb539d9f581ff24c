"""The rows of a Program sorted by message and by value, and how its instructions are named: what its checks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import BACKWARD, kinds_where
from schedc.ir.ops import OpKind
from schedc.ir.program import Channel, InstructionKind, Program, computation
from schedc.ir.schedule import Schedule

SEND, RECV, WAIT, REDUCE = InstructionKind.SEND, InstructionKind.RECV, InstructionKind.WAIT, InstructionKind.REDUCE
START, JOIN = InstructionKind.START, InstructionKind.JOIN

SHOWN = 3
"""Findings of one kind that are shown; the last says how many more there are."""


@dataclass(frozen=True, eq=False)
class ProgramTable:
    """A program with its rows sorted out; what a group of checks has established the later ones may use."""

    program: Program

    def rows(self, kind: InstructionKind) -> Int64:
        """[rows] the rows of instructions of this kind, ascending."""
        return np.flatnonzero(self.program.kind == kind)

    @cached_property
    def messages(self) -> Int64:
        """[messages] the numbers in use, ascending; the columns below are by position in it."""
        return np.unique(self.program.message[self.rows(SEND)]).astype(np.int64)

    @cached_property
    def send(self) -> Int64:
        """[messages] the row of each message's SEND."""
        return self._posts(SEND)

    @cached_property
    def receive(self) -> Int64:
        """[messages] the row of each message's RECV."""
        return self._posts(RECV)

    def _posts(self, kind: InstructionKind) -> Int64:
        rows = self.rows(kind)
        return rows[np.argsort(self.program.message[rows], kind="stable")]

    @cached_property
    def computation(self) -> tuple[Schedule, Int64]:
        """The schedule of the compute instructions, and [ops] the row of the instruction that runs each op."""
        return computation(self.program)

    @cached_property
    def flows(self) -> tuple[Int64, Int64]:
        """[2 * stages * microbatches] instructions that produce and that consume each value between stages, by slot
        (channel, producing stage, microbatch); -1 for no value."""
        producer, consumer = flows_of(*self.computation, (self.program.stages, self.program.microbatches))
        producer[consumer < 0] = -1
        return producer, consumer

    def slot(self, rows: Int64) -> Int64:
        """[rows] the slot in ``flows`` that each of these SEND, RECV or WAIT rows speaks of."""
        program = self.program
        return (program.channel[rows].astype(np.int64) * program.stages + program.stage[rows]) * (
            program.microbatches
        ) + program.microbatch[rows]

    def name(self, row: int) -> str:
        """How messages name an instruction: ``SEND of activation 0.3 to rank 1 (rank 0, instruction 12)``."""
        item = self.program.instruction(row)
        place = f"rank {item.rank}, instruction {row - int(self.program.rank_start[item.rank])}"
        if item.kind in (SEND, RECV, WAIT):
            to = {SEND: "to", RECV: "from", WAIT: "with"}[item.kind]
            what = f"the {channel_name(item.channel)} of microbatch {item.microbatch} from stage {item.stage}"
            return f"{item.kind.name} of {what} {to} rank {item.peer} (message {item.message}; {place})"
        if item.is_tied:
            tied = f"the weights that tie stage {item.stage} to stage {item.stage2}"
            return f"REDUCE of {tied} with rank {item.peer} ({place})"
        if item.kind is REDUCE:
            return f"REDUCE of stage {item.stage} with rank {item.peer} ({place})"
        if item.work >= 0:
            return f"{item.kind.name} of work {item.work}, the {self.program.works.work(item.work)} ({place})"
        return f"{item.stage}{item.kind.name}{item.microbatch} ({place})"

    def finding(self, code: str, row: int, message: str, others: tuple[int, ...] = (), help: str = "") -> Diagnostic:
        program = self.program
        notes = tuple(f"{self.name(other)}, for {program.where(other)}" for other in (row, *others))
        primary = Label(program.spans[program.span[row]], "the instruction serves this op")
        return Diagnostic(code, message, primary, notes=notes, help=help, source=program.source)

    def findings(self, rows: Int64, describe: Callable[[int], Diagnostic]) -> list[Diagnostic]:
        """Findings for the first `SHOWN` of ``rows`` [rows]; the last one says how many more there are."""
        shown = [describe(int(row)) for row in rows[:SHOWN]]
        if rows.size > SHOWN:
            shown[-1] = replace(shown[-1], notes=(*shown[-1].notes, f"and {rows.size - SHOWN} more like this"))
        return shown


def flows_of(ops: Any, row: Int64, shape: tuple[int, int]) -> tuple[Int64, Int64]:
    """[2 * stages * microbatches] rows that produce and that consume each value, by slot as in `ProgramTable.flows`.

    ops: has [ops] kind, stage and microbatch. row: [ops] the row to give for each op. shape: stages and microbatches.
    A value that nobody consumes may be produced.
    """
    producer = np.full((2, *shape), -1)
    for channel, kinds in ((Channel.ACTIVATION, [OpKind.F]), (Channel.GRADIENT, kinds_where(BACKWARD))):
        of_kind = np.flatnonzero(np.isin(ops.kind, kinds))
        producer[channel, ops.stage[of_kind], ops.microbatch[of_kind]] = row[of_kind]
    consumer = np.full_like(producer, -1)
    consumer[Channel.ACTIVATION, :-1] = producer[Channel.ACTIVATION, 1:]
    consumer[Channel.GRADIENT, 1:] = producer[Channel.GRADIENT, :-1]
    return producer.ravel(), consumer.ravel()


def channel_name(channel: int) -> str:
    return Channel(channel).name.lower()
