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

    The ends of a rank on one communicator are reached in the order of posts, one when the other is complete. With
    ``in_order`` false they are reached as soon as posted. `ended` is when the last cell of all ranks ended.
    """

    def __init__(
        self, program: Program, duration: Callable[[int, int], float], latency: float = 0.0, in_order: bool = True
    ) -> None:
        self.latency, self.in_order = latency, in_order
        self.streams = [list(program.instructions(rank)) for rank in range(program.ranks)]
        self.duration = duration
        sent = sorted(i.message for stream in self.streams for i in stream if i.kind is SEND)
        numbers = program.communicators.tolist() or [0] * len(sent)
        self.queue = dict(zip(sent, numbers, strict=True))
        self.ended = 0.0
        batches: dict[tuple[int, int], int] = {}
        self.unit = {
            i.message: batches.setdefault((i.batch, self.queue[i.message]), i.message) if i.batch >= 0 else i.message
            for stream in self.streams
            for i in stream
            if i.kind in (SEND, RECV)
        }
        self.finished: dict[int, float] = {}

    def makespan(self) -> float:
        at, now = [0] * len(self.streams), [0.0] * len(self.streams)
        cells = [0] * len(self.streams)
        kinds = sorted({*self.queue.values()})
        lines = {(rank, kind): deque[tuple[int, float]]() for rank in range(len(self.streams)) for kind in kinds}
        free = dict.fromkeys(lines, 0.0)
        ends: dict[int, list[tuple[int, float]]] = {}
        moved = True
        while moved:
            moved = False
            for rank, stream in enumerate(self.streams):
                while at[rank] < len(stream) and self.passes(stream[at[rank]], rank, now):
                    item = stream[at[rank]]
                    if item.kind in (SEND, RECV):
                        line = lines[rank, self.queue[item.message]]
                        if self.unit[item.message] not in [u for u, _ in line]:
                            line.append((self.unit[item.message], now[rank]))
                    if item.kind <= CELL:
                        now[rank] += self.duration(rank, cells[rank])
                        cells[rank] += 1
                        self.ended = max(self.ended, now[rank])
                    at[rank] += 1
                    moved = True
                queued = [(k, *entry) for k in kinds for entry in list(lines[rank, k])[: 1 if self.in_order else None]]
                for kind, unit, posted in queued:
                    reached = max(posted, free[rank, kind]) if self.in_order else posted
                    if rank in [end for end, _ in ends.get(unit, [])]:
                        continue
                    ends.setdefault(unit, []).append((rank, reached))
                    moved = True
                    if len(ends[unit]) == 2:
                        self.finished[unit] = max(time for _, time in ends[unit]) + self.latency
                        for end, _ in ends[unit]:
                            line = lines[end, kind]
                            line.remove(next(entry for entry in line if entry[0] == unit))
                            free[end, kind] = self.finished[unit]
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
