"""Whom a rank waits for: the ranks that must reach an instruction or a round before it can go on.

A WAIT needs the SEND or RECV of the same message on the other rank. A JOIN of a collective needs its START on every
member. A rank behind its last instruction needs the sums of the others. A rank in a round needs all others to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.ir.program import Instruction, InstructionKind, Program
from schedc.ir.works import WorkGroup
from schedc_runtime.ranks.progress import BEGUN, ENDED, Position
from schedc_runtime.ranks.standing import Standing


class Need(NamedTuple):
    """What must happen before a rank goes on: ``process`` passes ``row`` of the program; row -1: it comes to a round.

    sends: whether what this rank waits for comes from ``process``; else it goes there.
    """

    process: int
    row: int
    sends: bool = True


@dataclass(frozen=True)
class Ranks:
    """All ranks of a pipeline and its replicas, as they stand.

    programs: by number, as in `Position`. standings: [processes]. experts: ranks of an expert group. reporter: number
    of the process that has given up a wait, or -1. waits: whether a process stands in a wait inside an instruction.
    """

    programs: Mapping[int, Program]
    standings: Sequence[Standing]
    experts: int = 1
    reporter: int = -1
    waits: Callable[[int], bool] = lambda process: False

    def needs(self, process: int) -> list[Need]:
        """What ``process`` waits for, whether it has happened or not. Empty: it waits for nobody."""
        position = self.standings[process].position
        if position is None:
            return []
        if position.round % 2:
            return [Need(other, -1) for other in range(len(self.standings)) if other != process]
        program = self.programs.get(position.program)
        if program is None or (position.row < 0 and position.row != ENDED):
            return []
        rank, replica = divmod(process, self._replicas(program))
        if position.row == ENDED:
            return self._of_sums(program, rank, replica)
        x = program.instruction(position.row)
        if x.kind is InstructionKind.WAIT:
            return self._of_message(program, position.row, replica)
        if x.kind is InstructionKind.JOIN:
            return self._of_work(program, x, replica)
        if x.computes and self.experts > 1 and (process == self.reporter or self._is_in_wait(process, position)):
            first = replica - replica % self.experts
            group = range(first, first + self.experts)
            return [Need(self._process(program, rank, each), position.row) for each in group if each != replica]
        return []

    def is_met(self, process: int, need: Need) -> bool:
        """Whether the other rank has done its part of a need of ``process``."""
        own, other = self.standings[process].position, self.standings[need.process].position
        assert own is not None
        if other is None:
            return False
        if need.row < 0:
            return other.round // 2 >= own.round // 2
        if other.call != own.call:
            return other.call > own.call
        if other.row == BEGUN:
            return False
        shared = need.row == own.row == other.row  # an exchange inside the same instruction
        return other.row < 0 or other.row > need.row or (shared and self._is_in_wait(need.process, other))

    def _is_in_wait(self, process: int, position: Position) -> bool:
        return position.part.startswith("wait ") or self.waits(process)

    def _replicas(self, program: Program) -> int:
        return max(1, len(self.standings) // program.ranks)

    def _process(self, program: Program, rank: int, replica: int) -> int:
        return rank * self._replicas(program) + replica

    def _of_message(self, program: Program, row: int, replica: int) -> list[Need]:
        posts = (program.kind == InstructionKind.SEND) | (program.kind == InstructionKind.RECV)
        same = posts & (program.message == program.message[row]) & (program.rank != program.rank[row])
        return [
            Need(self._process(program, int(program.rank[post]), replica), int(post),
                 sends=bool(program.kind[post] == InstructionKind.SEND))
            for post in np.flatnonzero(same)
        ]  # fmt: skip

    def _of_work(self, program: Program, x: Instruction, replica: int) -> list[Need]:
        group = program.works.work(x.work).group
        if group is WorkGroup.LOCAL:
            return []
        starts = (program.kind == InstructionKind.START) & (program.work == x.work) & (program.rank == x.rank)
        step = self.experts if group is WorkGroup.SAME_EXPERTS else 1
        members = range(replica % step, self._replicas(program), step)
        return [
            Need(self._process(program, x.rank, each), int(start))
            for start in np.flatnonzero(starts)
            for each in members
            if each != replica
        ]

    def _of_sums(self, program: Program, rank: int, replica: int) -> list[Need]:
        """Sums with other copies of a stage, and among replicas, complete behind the last instruction."""
        sums = np.flatnonzero((program.kind == InstructionKind.REDUCE) & (program.peer == rank))
        needs = [Need(self._process(program, int(program.rank[row]), replica), int(row)) for row in sums]
        last = int(program.rank_start[rank + 1]) - 1
        others = (each for each in range(self._replicas(program)) if each != replica)
        return needs + [Need(self._process(program, rank, each), last) for each in others]
