"""The collectives of a whole Program on all replicas of every pipeline rank: whether all members issue the same ones.

The proof: a collective has a communicator and its number there. If all members of a communicator start the same
ones in the same order, and no rank stands at a wait for one that a member starts only after something that waits for
this rank, every collective is completed. The first is compared, the second is run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedc.cell.graph import Lane, Node, StageShape
from schedc.cell.program import Action, CellProgram, Half
from schedc.diagnostics import Diagnostic, Label
from schedc.ir.ops import OpKind
from schedc.ir.program import Instruction, InstructionKind, Program


class Cell(NamedTuple):
    """What one compute instruction runs: the graphs of its halves and its program."""

    forward: StageShape | None
    backward: StageShape | None
    program: CellProgram


CellOf = Callable[[int, int, Instruction], Cell]
"""(pipeline rank, replica, instruction) to its cell."""


class Collective(NamedTuple):
    """One collective as a rank starts it. ``communicator``: its members' name; ``number``: its place there.

    row: of the instruction in the Program; label: which exchange of which microbatch and stage.
    """

    communicator: str
    number: int
    label: str
    row: int


Key = tuple[str, int]
"""Communicator and number."""


class Event(NamedTuple):
    """What a rank does: it starts ``collective``, or stands until it is complete."""

    start: bool
    collective: Collective


@dataclass(frozen=True)
class ExpertRanks:
    """The replicas of a stage: ``data`` groups, each of the ranks that share its experts, ``nodes`` times ``per_node``.

    replica = group * group's size + expert rank; expert rank = node * per_node + position.
    """

    nodes: int
    per_node: int
    data: int = 1

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return self.nodes * self.per_node

    @property
    def replicas(self) -> int:
        return self.size * self.data

    def communicator(self, lane: Lane, scope: str, replica: int) -> str:
        """By scope: all replicas; the ranks of a group; or by ``lane`` its ranks in one node or in one position."""
        group, rank = divmod(replica, self.size)
        node, position = divmod(rank, self.per_node)
        if scope == "replicas":
            return scope
        name = scope if scope == "expert" else f"rail {position}" if lane is Lane.RAIL else f"node {node}"
        return name if self.data == 1 else f"{name} of group {group}"

    def members(self, communicator: str) -> range:
        """Its replicas."""
        if communicator == "replicas":
            return range(self.replicas)
        own, _, group = communicator.partition(" of group ")
        begin = int(group or 0) * self.size
        kind, _, number = own.partition(" ")
        if kind == "expert":
            return range(begin, begin + self.size)
        if kind == "rail":
            return range(begin + int(number), begin + self.size, self.per_node)
        first = begin + int(number) * self.per_node
        return range(first, first + self.per_node)


def events(program: Program, rank: int, replica: int, group: ExpertRanks, cell_of: CellOf) -> list[Event]:
    """All that one rank starts and waits for, in order."""
    issued: dict[str, int] = {}
    found: list[Event] = []
    first = int(program.rank_start[rank])
    for row, item in enumerate(program.instructions(rank), start=first):
        if item.kind > InstructionKind.CELL:
            continue
        cell = cell_of(rank, replica, item)
        started: dict[tuple[Half, int], Collective] = {}
        for action, half, node in cell.program.steps:
            if action is Action.START:
                shape = cell.forward if half is Half.FORWARD else cell.backward
                assert shape is not None
                communicator = group.communicator(shape.nodes[node].lane, _scope(shape, node), replica)
                number = issued[communicator] = issued.get(communicator, -1) + 1
                label = f"{_microbatch(item, half)} {half} {shape.nodes[node].name}"
                started[half, node] = Collective(communicator, number, label, row)
                found.append(Event(True, started[half, node]))
            elif action is Action.WAIT and (half, node) in started:
                found.append(Event(False, started[half, node]))
    return found


def _scope(shape: StageShape, node: int) -> str:
    """The balance is exchanged among all replicas; the routing and flat rows in a group; a hop of two in its lane."""
    own = shape.nodes[node]
    if own.role == "balance":
        return "replicas"
    return "lane" if own.role != "routing" and _two_hops(shape, own) else "expert"


def _two_hops(shape: StageShape, own: Node) -> bool:
    lanes = {node.lane for node in shape.nodes if node.role == own.role and node.layer == own.layer}
    return len(lanes) > 1


def _microbatch(item: Instruction, half: Half) -> str:
    """``F of microbatch 3 on stage 1``."""
    second = item.kind is InstructionKind.CELL and half is not Half.FORWARD
    kind = OpKind(item.backward).name if second else ("F" if item.kind is InstructionKind.CELL else item.kind.name)
    stage, microbatch = (item.stage2, item.microbatch2) if second else (item.stage, item.microbatch)
    return f"{stage}{kind}{microbatch}"


def verify_collectives(program: Program, group: ExpertRanks, cell_of: CellOf) -> list[Diagnostic]:
    """What keeps the collectives of a program from completing, per pipeline rank; empty if all of them do.

    S321: two members of a communicator do not start the same collectives in the same order. S322: ranks wait for
    each other for ever. Members are replicas of one pipeline rank; messages between pipeline ranks are the same on
    all of them, and `schedc.ir.verify_program` judges those.
    """
    found: list[Diagnostic] = []
    for rank in range(program.ranks):
        if _alike(program, rank, group, cell_of):
            continue
        streams = [events(program, rank, replica, group, cell_of) for replica in range(group.replicas)]
        found += list(_unequal(program, rank, group, streams)) or list(_stall(program, rank, group, streams))
    return found


def _alike(program: Program, rank: int, group: ExpertRanks, cell_of: CellOf) -> bool:
    """Whether all members run the same cells: then they issue the same, in one order, and none waits for another.

    The first collective that is not complete is the same on all of them, and all come to it.
    """
    compute = [item for item in program.instructions(rank) if item.kind <= InstructionKind.CELL]
    lead = [cell_of(rank, 0, item) for item in compute]
    return all(
        cell_of(rank, replica, item) == cell
        for replica in range(1, group.replicas)
        for item, cell in zip(compute, lead, strict=True)
    )


def _unequal(
    program: Program, rank: int, group: ExpertRanks, streams: Sequence[Sequence[Event]]
) -> Iterator[Diagnostic]:
    """Of every communicator, the first place where a member differs from the first member."""
    starts: list[dict[str, list[Collective]]] = []
    for stream in streams:
        by_name: dict[str, list[Collective]] = {}
        for event in stream:
            if event.start:
                by_name.setdefault(event.collective.communicator, []).append(event.collective)
        starts.append(by_name)
    for name in dict.fromkeys(name for by_name in starts for name in by_name):
        lead, *others = group.members(name)
        for other in others:
            ours, theirs = starts[lead].get(name, []), starts[other].get(name, [])
            if [one.label for one in ours] != [one.label for one in theirs]:
                yield _difference(program, rank, name, (lead, ours), (other, theirs))
                break


def _difference(
    program: Program, rank: int, name: str, one: tuple[int, list[Collective]], two: tuple[int, list[Collective]]
) -> Diagnostic:
    (first, ours), (second, theirs) = one, two
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a.label != b.label), -1)
    at = min(len(ours), len(theirs)) if at < 0 else at
    notes = tuple(
        f"replica {replica}: {_name(program, held[at]) if at < len(held) else 'has no more collectives there'}"
        for replica, held in ((first, ours), (second, theirs))
    )
    row = (ours[at] if at < len(ours) else theirs[at]).row
    return _finding(
        "S321", program, row, f"pipeline rank {rank}: replicas {first} and {second} do not agree on collective "
        f"{at} of communicator `{name}`", notes,
    )  # fmt: skip


def _stall(program: Program, rank: int, group: ExpertRanks, streams: Sequence[Sequence[Event]]) -> Iterator[Diagnostic]:
    """Runs the streams under the strictest rules: each rank's collectives go on one at a time, in the order of their
    starts whatever the communicator, and a collective is complete when it is the turn of all of its members."""
    machine = _Machine(group, streams)
    stuck = machine.run()
    if stuck:
        stands = [streams[replica][machine.at[replica]].collective for replica in stuck]
        notes = tuple(
            f"replica {replica} waits for {_name(program, one)}" for replica, one in zip(stuck, stands, strict=True)
        )
        text = f"pipeline rank {rank}: replicas {', '.join(map(str, stuck))} wait for each other for ever"
        yield _finding("S322", program, stands[0].row, text, notes[:4])


class _Machine:
    """The replicas of one pipeline rank. ``line``: what each has started and is not complete."""

    def __init__(self, group: ExpertRanks, streams: Sequence[Sequence[Event]]) -> None:
        self.group, self.streams = group, streams
        self.at = [0] * len(streams)
        self.line: list[deque[Key]] = [deque() for _ in streams]
        self.turns: dict[Key, int] = {}
        self.done: set[Key] = set()

    def run(self) -> list[int]:
        """The ranks that stand for ever; empty if all come to their ends."""
        moved = True
        while moved:
            moved = any(self._advance(replica) for replica in range(len(self.streams)))
        return [replica for replica, stream in enumerate(self.streams) if self.at[replica] < len(stream)]

    def _advance(self, replica: int) -> bool:
        stream, begin = self.streams[replica], self.at[replica]
        while self.at[replica] < len(stream):
            start, collective = stream[self.at[replica]]
            key = (collective.communicator, collective.number)
            if start:
                self.line[replica].append(key)
                if len(self.line[replica]) == 1:
                    self._turn(key)
            elif key not in self.done:
                break
            self.at[replica] += 1
        return self.at[replica] > begin

    def _turn(self, key: Key) -> None:
        """It is this collective's turn on one more rank; with the last one it completes, and lines move on."""
        pending = [key]
        while pending:
            key = pending.pop()
            self.turns[key] = self.turns.get(key, 0) + 1
            members = self.group.members(key[0])
            if self.turns[key] == len(members):
                self.done.add(key)
                for replica in members:
                    self.line[replica].popleft()
                    if self.line[replica]:
                        pending.append(self.line[replica][0])


def _name(program: Program, one: Collective) -> str:
    rank = int(program.rank[one.row])
    place = f"rank {rank}, instruction {one.row - int(program.rank_start[rank])}"
    return f"{one.label} as number {one.number} of `{one.communicator}` ({place})"


def _finding(code: str, program: Program, row: int, message: str, notes: tuple[str, ...]) -> Diagnostic:
    place = Label(program.spans[program.span[row]], "the cell of this op")
    help = "all ranks of a group need one cell program: compile it from the same costs and the same order"
    return Diagnostic(code, message, place, notes=notes, help=help, source=program.source)
