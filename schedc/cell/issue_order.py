"""What every rank of a Program issues, in order: the collectives of its cells, the messages before and behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from schedc.cell.graph import Lane, Node, StageShape
from schedc.cell.program import Action, CellProgram, Edge, Half, Step
from schedc.cell.with_messages import POSTS, MovedMessage, batch_width, interleave_messages
from schedc.ir.program import Instruction, InstructionKind, Program


class CellOnRank(NamedTuple):
    """What one compute instruction runs: the graphs of its halves and its program."""

    forward: StageShape | None
    backward: StageShape | None
    program: CellProgram


RankReplica = tuple[int, int]
"""Pipeline rank and replica."""

CellOf = Callable[[int, int, Instruction], CellOnRank]
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
    parts = {at: interleave_messages(items, at, cell.program) for at, cell in cells.items()}
    moved = {part.at for within in parts.values() for part in within if isinstance(part, MovedMessage)}
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
            if isinstance(part, MovedMessage):
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
    item: Instruction, row: int, cell: CellOnRank, step: Step, group: ExpertRanks, replica: int, issued: dict[str, int]
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
    forward, backward = item.kind_name[:1], item.kind_name[-1]
    if half is Half.FORWARD:
        return f"{item.stage}{forward}{item.microbatch}"
    stage, microbatch = item.backward_slot
    return f"{stage}{backward}{microbatch}"
