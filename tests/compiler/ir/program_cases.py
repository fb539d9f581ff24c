"""Published orders by name, and an independent clock that runs a program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from schedc.ir.program import Instruction, InstructionKind, Program
from support.random_schedules import ORDERS

F, B, CELL = InstructionKind.F, InstructionKind.B, InstructionKind.CELL
SEND, RECV, WAIT, REDUCE = InstructionKind.SEND, InstructionKind.RECV, InstructionKind.WAIT, InstructionKind.REDUCE
NAMES = [path.stem.rsplit("_P4", 1)[0] for path in ORDERS]


class Clock:
    """Times of a run. A message completes ``latency`` after both ends have reached it.

    The ends of a rank are reached in the order of posts, one when the other is complete, or (``in_order`` false) as
    soon as posted.
    """

    def __init__(
        self, program: Program, duration: Callable[[int, int], float], latency: float = 0.0, in_order: bool = True
    ) -> None:
        self.latency, self.in_order = latency, in_order
        self.streams = [list(program.instructions(rank)) for rank in range(program.ranks)]
        self.duration = duration
        batches: dict[int, int] = {}
        self.unit = {
            i.message: batches.setdefault(i.batch, i.message) if i.batch >= 0 else i.message
            for stream in self.streams
            for i in stream
            if i.kind in (SEND, RECV)
        }
        self.finished: dict[int, float] = {}

    def makespan(self) -> float:
        at, now = [0] * len(self.streams), [0.0] * len(self.streams)
        cells = [0] * len(self.streams)
        lines: list[deque[tuple[int, float]]] = [deque() for _ in self.streams]
        free = [0.0] * len(self.streams)
        ends: dict[int, list[tuple[int, float]]] = {}
        moved = True
        while moved:
            moved = False
            for rank, stream in enumerate(self.streams):
                while at[rank] < len(stream) and self.passes(stream[at[rank]], rank, now):
                    item = stream[at[rank]]
                    if item.kind in (SEND, RECV) and self.unit[item.message] not in [u for u, _ in lines[rank]]:
                        lines[rank].append((self.unit[item.message], now[rank]))
                    if item.kind <= CELL:
                        now[rank] += self.duration(rank, cells[rank])
                        cells[rank] += 1
                    at[rank] += 1
                    moved = True
                for unit, posted in list(lines[rank])[: 1 if self.in_order else None]:
                    reached = max(posted, free[rank]) if self.in_order else posted
                    if rank in [end for end, _ in ends.get(unit, [])]:
                        continue
                    ends.setdefault(unit, []).append((rank, reached))
                    moved = True
                    if len(ends[unit]) == 2:
                        self.finished[unit] = max(time for _, time in ends[unit]) + self.latency
                        for end, _ in ends[unit]:
                            lines[end].remove(next(entry for entry in lines[end] if entry[0] == unit))
                            free[end] = self.finished[unit]
        assert all(position == len(stream) for position, stream in zip(at, self.streams, strict=True))
        return max(now)

    def passes(self, item: Instruction, rank: int, now: list[float]) -> bool:
        if item.kind is not WAIT:
            return True
        finished = self.finished.get(self.unit[item.message])
        if finished is None:
            return False
        now[rank] = max(now[rank], finished)
        return True
