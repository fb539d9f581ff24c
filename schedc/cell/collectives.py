"""Checks the collectives of a Program on all replicas of every pipeline rank: all match, and all complete.

Every collective completes under two conditions. All members of a communicator start the same collectives in the same
order: this is compared. No rank waits for a collective that a member starts only after it has waited for this rank:
this is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from schedc.cell.issue_order import CellOf, Collective, Event, ExpertRanks, Post, RankReplica, stream
from schedc.diagnostics import Diagnostic, Label
from schedc.ir.program import InstructionKind, Program
from schedc.ir.rendezvous import Link, QueueAction, QueueStep, Streams, find_stuck


def verify_collectives(
    program: Program, group: ExpertRanks, cell_of: CellOf, own: Mapping[int, Program] | None = None
) -> list[Diagnostic]:
    """Findings, per pipeline rank, about collectives that cannot complete; empty if all of them complete.

    S321: two members of a communicator do not start the same collectives in the same order. S322: ranks deadlock, in
    collectives alone or together with messages between pipeline ranks, which share the queues. The members of a
    communicator are replicas of one pipeline rank. `schedc.ir.verify_program` checks the messages without collectives.
    Works among replicas are collectives, too, with a communicator for their lane and each group. own: the programs of
    replicas that run another one, with as many instructions.

    Where all members run the same cells and works, nothing needs to be simulated. Proof: take the lowest message, over
    all pipelines, that does not complete. Before its two posts are only waits for lower messages (docs/decisions/0001);
    moving messages into cells adds no waits. The collectives before the posts are the same on all members. So the
    message completes.
    """
    ranks = range(program.ranks)
    own = {replica: other for replica, other in (own or {}).items() if other is not program}
    apart = [rank for rank in ranks if own or not _alike(program, rank, group, cell_of)]
    if not apart:
        return []
    streams = {
        (rank, replica): stream(own.get(replica, program), rank, replica, group, cell_of)
        for rank in ranks
        for replica in range(group.replicas)
    }
    findings: list[Diagnostic] = []
    for rank in apart:
        events = [
            [event for event in streams[rank, replica] if isinstance(event, Event)] for replica in range(group.replicas)
        ]
        unequal = list(_unequal(program, rank, group, events))
        findings += unequal or _deadlock(program, {(rank, replica): each for replica, each in enumerate(events)})
    return findings or _deadlock(program, streams)


def _alike(program: Program, rank: int, group: ExpertRanks, cell_of: CellOf) -> bool:
    """Whether all members run the same cells. Then they start the same collectives in one order and cannot deadlock.

    Works are those of the program, which all members run.

    Proof: the first collective that does not complete is the same on all members, and all of them reach it.
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
    """S321 for each communicator: the first collective in which a member differs from the first member."""
    starts: list[dict[str, list[Collective]]] = []
    for own in streams:
        by_name: dict[str, list[Collective]] = {}
        for event in own:
            if event.start:
                by_name.setdefault(event.collective.communicator, []).append(event.collective)
        starts.append(by_name)
    for name in dict.fromkeys(name for by_name in starts for name in by_name):
        lead, *members = group.members(name)
        for member in members:
            ours, theirs = starts[lead].get(name, []), starts[member].get(name, [])
            if [collective.label for collective in ours] != [collective.label for collective in theirs]:
                yield _difference(program, rank, name, (lead, ours), (member, theirs))
                break


def _difference(
    program: Program, rank: int, name: str, lead: tuple[int, list[Collective]], member: tuple[int, list[Collective]]
) -> Diagnostic:
    (first, ours), (second, theirs) = lead, member
    number = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a.label != b.label), -1)
    number = min(len(ours), len(theirs)) if number < 0 else number
    notes = tuple(
        f"replica {replica}: "
        + (_name(program, collectives[number]) if number < len(collectives) else "has no more collectives there")
        for replica, collectives in ((first, ours), (second, theirs))
    )
    row = (ours[number] if number < len(ours) else theirs[number]).row
    return _finding(
        "S321", program, row, f"pipeline rank {rank}: replicas {first} and {second} do not agree on collective "
        f"{number} of communicator `{name}`", notes,
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


def _row(event: Event | Post) -> int:
    return event.collective.row if isinstance(event, Event) else event.row


def _name(program: Program, event: Collective | Event | Post) -> str:
    if isinstance(event, Event):
        return _name(program, event.collective)
    rank = int(program.rank[event.row])
    place = f"rank {rank}, instruction {event.row - int(program.rank_start[rank])}"
    if isinstance(event, Post):
        return f"{event.unit} ({place})"
    return f"{event.label} as number {event.number} of `{event.communicator}` ({place})"


def _finding(code: str, program: Program, row: int, message: str, notes: tuple[str, ...]) -> Diagnostic:
    place = Label(program.spans[program.span[row]], "the cell of this op")
    help = "all ranks of a group need one program and one cell program: compile them from the same costs and order"
    return Diagnostic(code, message, place, notes=notes, help=help, source=program.source)
