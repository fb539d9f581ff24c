"""The collectives of a whole Program on all replicas of every pipeline rank: whether all members issue the same ones.

The proof: a collective has a communicator and its number there. If all members of a communicator start the same
ones in the same order, and no rank stands at a wait for one that a member starts only after something that waits for
this rank, every collective is completed. The first is compared, the second is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedc.cell.graph import Lane, Node, StageShape
from schedc.cell.meeting import Act, stand_for_ever
from schedc.cell.opened import POSTS, Moved, batch_width, opened
from schedc.cell.program import Action, CellProgram, Edge, Half, Step
from schedc.diagnostics import Diagnostic, Label
from schedc.ir.ops import OpKind
from schedc.ir.program import Instruction, InstructionKind, Program


class Cell(NamedTuple):
    """What one compute instruction runs: the graphs of its halves and its program."""

    forward: StageShape | None
    backward: StageShape | None
    program: CellProgram


Place = tuple[int, int]
"""Pipeline rank and replica."""

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


class Event(NamedTuple):
    """What a rank does: it starts ``collective``, or stands until it is complete."""

    start: bool
    collective: Collective


class Post(NamedTuple):
    """A rank posts a message or a batch of them (``unit``), or stands until it is complete. row: in the Program."""

    start: bool
    unit: str
    row: int


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
    """All collectives that one rank starts and waits for, in order."""
    return [one for one in stream(program, rank, replica, group, cell_of) if isinstance(one, Event)]


def stream(program: Program, rank: int, replica: int, group: ExpertRanks, cell_of: CellOf) -> list[Event | Post]:
    """All collectives and messages that one rank starts and waits for, in order; not the reductions at the end."""
    items, first = list(program.instructions(rank)), int(program.rank_start[rank])
    cells = {at: cell_of(rank, replica, item) for at, item in enumerate(items) if item.kind <= InstructionKind.CELL}
    parts = {at: opened(items, at, cell.program) for at, cell in cells.items()}
    moved = {part.at for within in parts.values() for part in within if isinstance(part, Moved)}
    batch = {item.message: item.batch for item in items if item.batch >= 0}
    issued: dict[str, int] = {}
    found: list[Event | Post] = []

    def message(at: int) -> None:
        for item in items[at : at + batch_width(items, at)]:
            unit = f"batch {batch[item.message]}" if item.message in batch else f"message {item.message}"
            if not found or found[-1] != Post(item.kind in POSTS, unit, first + at):
                found.append(Post(item.kind in POSTS, unit, first + at))

    at = 0
    while at < len(items):
        started: dict[tuple[Half, int], Collective] = {}
        for part in parts.get(at, ()):
            if isinstance(part, Moved):
                message(part.at)
            elif isinstance(part, Edge) or part.action is Action.RUN:
                continue
            elif part.action is Action.START:
                started[part.half, part.node] = one = _started(
                    items[at], first + at, cells[at], part, group, replica, issued
                )
                found.append(Event(True, one))
            elif (part.half, part.node) in started:
                found.append(Event(False, started[part.half, part.node]))
        if items[at].kind in (*POSTS, InstructionKind.WAIT) and at not in moved:
            message(at)
        at += batch_width(items, at)
    return found


def _started(
    item: Instruction, row: int, cell: Cell, step: Step, group: ExpertRanks, replica: int, issued: dict[str, int]
) -> Collective:
    """The collective that a step of a cell starts, counted in ``issued``."""
    shape = cell.forward if step.half is Half.FORWARD else cell.backward
    assert shape is not None
    node = shape.nodes[step.node]
    communicator = group.communicator(node.lane, _scope(shape, step.node), replica)
    number = issued[communicator] = issued.get(communicator, -1) + 1
    return Collective(communicator, number, f"{_microbatch(item, step.half)} {step.half} {node.name}", row)


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
    each other for ever, for collectives alone, or as messages between pipeline ranks are in the same line. The members
    of a communicator are replicas of one pipeline rank. Without the collectives, `schedc.ir.verify_program` judges
    the messages.

    Nothing has to be run where all members run the same cells. Of the messages that are not complete, in any pipeline,
    take the lowest. Before its two posts stand only waits for lower ones (docs/decisions/0001), in an opened cell no
    more than in a closed one, and collectives that all members come to alike: it completes.
    """
    ranks = range(program.ranks)
    apart = [rank for rank in ranks if not _alike(program, rank, group, cell_of)]
    if not apart:
        return []
    streams = {
        (rank, replica): stream(program, rank, replica, group, cell_of)
        for rank in ranks
        for replica in range(group.replicas)
    }
    found: list[Diagnostic] = []
    for rank in apart:
        own = [[one for one in streams[rank, replica] if isinstance(one, Event)] for replica in range(group.replicas)]
        unequal = list(_unequal(program, rank, group, own))
        found += unequal or _stall(program, {(rank, replica): events for replica, events in enumerate(own)})
    return found or _stall(program, streams)


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


def _stall(program: Program, streams: Mapping[Place, Sequence[Event | Post]]) -> list[Diagnostic]:
    """S322: runs the streams under the strictest rules (`schedc.cell.meeting`)."""
    places = list(streams)
    stuck = stand_for_ever([[Act(one.start, _thing(place, one)) for one in streams[place]] for place in places])
    if not stuck:
        return []
    stands = [(places[which], streams[places[which]][at]) for which, at in stuck]
    rank = next((rank for (rank, _), one in stands if isinstance(one, Post)), stands[0][0][0])
    here = [(replica, one) for (at, replica), one in stands if at == rank]
    notes = tuple(f"replica {replica} waits for {_name(program, one)}" for replica, one in here)
    replicas = ", ".join(str(replica) for replica, _ in here)
    text = f"pipeline rank {rank}: replicas {replicas} wait for each other for ever"
    return [_finding("S322", program, _row(here[0][1]), text, notes[:4])]


def _thing(place: Place, one: Event | Post) -> tuple[int, str, int]:
    """What ranks meet in: a collective of one pipeline rank, a message of one pipeline."""
    if isinstance(one, Event):
        return place[0], one.collective.communicator, one.collective.number
    return place[1], one.unit, -1


def _row(one: Event | Post) -> int:
    return one.collective.row if isinstance(one, Event) else one.row


def _name(program: Program, one: Collective | Event | Post) -> str:
    if isinstance(one, Event):
        return _name(program, one.collective)
    rank = int(program.rank[one.row])
    place = f"rank {rank}, instruction {one.row - int(program.rank_start[rank])}"
    if isinstance(one, Post):
        return f"{one.unit} ({place})"
    return f"{one.label} as number {one.number} of `{one.communicator}` ({place})"


def _finding(code: str, program: Program, row: int, message: str, notes: tuple[str, ...]) -> Diagnostic:
    place = Label(program.spans[program.span[row]], "the cell of this op")
    help = "all ranks of a group need one cell program: compile it from the same costs and the same order"
    return Diagnostic(code, message, place, notes=notes, help=help, source=program.source)
