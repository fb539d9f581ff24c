"""Lists what every rank of a Program issues, in order: collectives of cells and works, and the messages around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from schedc.cell.graph import COUNTING, Lane, Node, StageShape
from schedc.cell.program import Action, CellProgram, CellStep, Edge, Half, graph_of
from schedc.cell.with_messages import POSTS, MovedMessage, batch_width, interleave_messages
from schedc.ir.program import Instruction, InstructionKind, Program
from schedc.ir.works import WorkGroup


class CellOnRank(NamedTuple):
    """The cell of a compute instruction on one rank: the graphs of its halves, None where it lacks a half, and its
    program."""

    forward: StageShape | None
    backward: StageShape | None
    program: CellProgram


RankReplica = tuple[int, int]
"""Pipeline rank and replica."""

CellOf = Callable[[int, int, Instruction], CellOnRank]
"""(pipeline rank, replica, instruction) to its cell."""


class Collective(NamedTuple):
    """A rank's start of a collective.

    communicator: name of the ranks that take part. number: position among the collectives of that communicator.
    label: exchange, microbatch and stage. row: row of the instruction in the Program.
    """

    communicator: str
    number: int
    label: str
    row: int


class Event(NamedTuple):
    """A rank starts ``collective``, or blocks until it is complete."""

    start: bool
    collective: Collective


class Post(NamedTuple):
    """A rank posts ``unit``, a message or a batch, or blocks until it is complete. row: row in the Program."""

    start: bool
    unit: str
    row: int


_WORKS = "dp"


@dataclass(frozen=True)
class ExpertRanks:
    """The replicas of a stage: ``data`` groups of ``nodes`` times ``per_node`` ranks, which share the experts.

    replica = group * size of a group + expert rank; expert rank = node * per_node + position.
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
        """Name of the communicator of a replica.

        scope: ``replicas`` for all replicas, ``expert`` for a group, ``lane`` for a group's ranks in one node or, on
            the rail, in one position.
        """
        group, rank = divmod(replica, self.size)
        node, position = divmod(rank, self.per_node)
        if scope == "replicas":
            return scope
        name = scope if scope == "expert" else f"rail {position}" if lane is Lane.RAIL else f"node {node}"
        return name if self.data == 1 else f"{name} of group {group}"

    def communicator_of_works(self, among: WorkGroup, replica: int) -> str:
        """Name of the communicator of a replica for works: one for each group, apart from those of cells."""
        return _WORKS if among is WorkGroup.REPLICAS else f"{_WORKS} of expert rank {replica % self.size}"

    def members(self, communicator: str) -> range:
        """The replicas that take part in a communicator."""
        if communicator in ("replicas", _WORKS):
            return range(self.replicas)
        if communicator.startswith(_WORKS):
            return range(int(communicator.rpartition(" ")[2]), self.replicas, self.size)
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
    return [event for event in stream(program, rank, replica, group, cell_of) if isinstance(event, Event)]


def stream(program: Program, rank: int, replica: int, group: ExpertRanks, cell_of: CellOf) -> list[Event | Post]:
    """All collectives and messages that one rank starts and waits for, in order, without the reductions at the end."""
    items, first = list(program.instructions(rank)), int(program.rank_start[rank])
    cells = {
        index: cell_of(rank, replica, item) for index, item in enumerate(items) if item.kind <= InstructionKind.CELL
    }
    parts = {index: interleave_messages(items, index, cell.program) for index, cell in cells.items()}
    moved = {part.at for within in parts.values() for part in within if isinstance(part, MovedMessage)}
    batch = {item.message: item.batch for item in items if item.batch >= 0}
    counts: dict[str, int] = {}
    issued: list[Event | Post] = []

    def message(index: int) -> None:
        for item in items[index : index + batch_width(items, index)]:
            unit = f"batch {batch[item.message]}" if item.message in batch else f"message {item.message}"
            if not issued or issued[-1] != Post(item.kind in POSTS, unit, first + index):
                issued.append(Post(item.kind in POSTS, unit, first + index))

    index = 0
    while index < len(items):
        started: dict[tuple[Half, int], Collective] = {}
        for part in parts.get(index, ()):
            if isinstance(part, MovedMessage):
                message(part.at)
            elif isinstance(part, Edge) or part.action is Action.RUN or _alone(cells[index], part):
                continue
            elif part.action is Action.START:
                started[part.half, part.node] = collective = _started(
                    items[index], first + index, cells[index], part, group, replica, counts
                )
                issued.append(Event(True, collective))
            elif (part.half, part.node) in started:
                issued.append(Event(False, started[part.half, part.node]))
        if items[index].kind in (*POSTS, InstructionKind.WAIT) and index not in moved:
            message(index)
        if items[index].work >= 0:
            issued += _of_work(program, items[index], first + index, group, replica, counts)
        index += batch_width(items, index)
    return issued


def _of_work(
    program: Program, item: Instruction, row: int, group: ExpertRanks, replica: int, counts: dict[str, int]
) -> list[Event | Post]:
    """The collective that a START begins or a JOIN awaits; nothing for a work that involves no other rank.

    counts: how many collectives of each communicator have been started, less 1. Works of a communicator are numbered by
    their STARTs, so the number of a work is that of the works of the rank before it.
    """
    work = program.works.work(item.work)
    if work.group is WorkGroup.LOCAL:
        return []
    communicator = group.communicator_of_works(work.group, replica)
    if item.kind is InstructionKind.START:
        number = counts[communicator] = counts.get(communicator, -1) + 1
        counts[f"{communicator}, work {item.work}"] = number
    number = counts.get(f"{communicator}, work {item.work}", -1)
    return [Event(item.kind is InstructionKind.START, Collective(communicator, number, str(work), row))]


def _alone(cell: CellOnRank, step: CellStep) -> bool:
    """Whether a step involves no other rank: it asks the own host."""
    shape = graph_of(cell.program.kind, step.half, cell.forward, cell.backward)
    return shape is not None and shape.nodes[step.node].lane is Lane.HOST


def _started(
    item: Instruction,
    row: int,
    cell: CellOnRank,
    step: CellStep,
    group: ExpertRanks,
    replica: int,
    issued: dict[str, int],
) -> Collective:
    """The collective that a step of a cell starts, counted in ``issued``."""
    shape = graph_of(cell.program.kind, step.half, cell.forward, cell.backward)
    assert shape is not None
    node = shape.nodes[step.node]
    communicator = group.communicator(node.lane, scope(shape, step.node), replica)
    number = issued[communicator] = issued.get(communicator, -1) + 1
    op = _op(item, cell.program.kind, step.half)
    return Collective(communicator, number, f"{op} {step.half} {node.name}", row)


def scope(shape: StageShape, node: int) -> str:
    """The balance is exchanged among all replicas, the routing and flat rows in a group, one hop of two in its lane.

    Copies of experts inside nodes are exchanged in their lane.
    """
    own = shape.nodes[node]
    if own.role == "balance":
        return "replicas"
    if own.role == "hot":
        routing = next(node.lane for node in shape.nodes if (node.layer, node.role) == (own.layer, "routing"))
        return "expert" if own.lane is routing else "lane"
    return "lane" if own.role not in COUNTING and _two_hops(shape, own) else "expert"


def _two_hops(shape: StageShape, own: Node) -> bool:
    lanes = {node.lane for node in shape.nodes if node.role == own.role and node.layer == own.layer}
    return len(lanes) > 1


def _op(item: Instruction, kind: str, half: Half) -> str:
    """The op of a cell of this kind that has the half, as ``1F3``."""
    letter, stage, microbatch = graph_of(kind, half, item.ops[0], item.ops[-1])
    return f"{stage}{letter.name}{microbatch}"
