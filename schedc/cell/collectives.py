"""The collectives of a whole Program on all replicas of every pipeline rank: whether all members issue the same ones.

The proof: a collective has a communicator and its number there. If all members of a communicator start the same
ones in the same order, and no rank stands at a wait for one that a member starts only after something that waits for
this rank, every collective is completed. The first is compared, the second is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from schedc.cell.issue_order import CellOf, Collective, Event, ExpertRanks, Post, RankReplica, stream
from schedc.diagnostics import Diagnostic, Label
from schedc.ir.program import InstructionKind, Program
from schedc.ir.rendezvous import Link, QueueAction, QueueStep, Streams, find_stuck


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
        found += unequal or _deadlock(program, {(rank, replica): events for replica, events in enumerate(own)})
    return found or _deadlock(program, streams)


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
    for own in streams:
        by_name: dict[str, list[Collective]] = {}
        for event in own:
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


def _deadlock(program: Program, streams: Mapping[RankReplica, Sequence[Event | Post]]) -> list[Diagnostic]:
    """S322: runs the streams under the strictest rules (`schedc.ir.rendezvous`)."""
    steps = [(place, event) for place in streams for event in streams[place]]
    stuck = find_stuck(Streams.of([[_step(place, event) for event in events] for place, events in streams.items()]))
    if stuck is None:
        return []
    blocked = [steps[position] for position in stuck.positions]
    rank = next((rank for (rank, _), event in blocked if isinstance(event, Post)), blocked[0][0][0])
    here = [(replica, event) for (of, replica), event in blocked if of == rank]
    replicas = ", ".join(str(replica) for replica, _ in here)
    text = f"pipeline rank {rank}: replicas {replicas} wait for each other for ever"
    return [_finding("S322", program, _row(here[0][1]), text, _trail(program, steps, stuck.cycle))]


def _trail(
    program: Program, steps: Sequence[tuple[RankReplica, Event | Post]], cycle: Sequence[Link]
) -> tuple[str, ...]:
    """The shortest cycle of what blocks, as `schedc.ir.verify_program` writes it for a program (S310)."""

    def member(link: Link) -> str:
        (rank, replica), _ = steps[link.waits]
        return f"replica {replica} of rank {rank}"

    def line(link: Link) -> str:
        waits, holds = (_name(program, steps[position][1]) for position in (link.waits, link.holds))
        if link.blocked:
            return f"{member(link)} stands at {waits}, before {holds}"
        return f"on {member(link)}, {holds} completes only after {waits}"

    members = [name for name, _ in groupby(member(link) for link in (*cycle, *cycle[:1]))]
    return ("the shortest circle: " + " <- ".join(f"{name} waits" for name in members), *map(line, cycle))


def _step(place: RankReplica, event: Event | Post) -> QueueStep:
    """The step on what ranks share: a collective of one pipeline rank, a message of one pipeline."""
    rank, replica = place
    action = QueueAction.START if event.start else QueueAction.WAIT
    if isinstance(event, Event):
        return QueueStep(action, (rank, event.collective.communicator, event.collective.number))
    return QueueStep(action, (replica, event.unit, -1))


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
