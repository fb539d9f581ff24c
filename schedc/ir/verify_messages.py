"""The invariants of a Program's messages, one function each; the later ones rely on the earlier ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from schedc.diagnostics import Diagnostic
from schedc.ir.arrays import Int64
from schedc.ir.communicators import communicators_of
from schedc.ir.program import InstructionKind
from schedc.ir.program_table import RECV, SEND, WAIT, ProgramTable, channel_name


def _numbers(table: ProgramTable) -> list[Diagnostic]:
    """S311: every message number belongs to one SEND and one RECV."""
    program = table.program
    found: list[Diagnostic] = []
    for kind, other in ((SEND, RECV), (RECV, SEND)):
        rows, others = table.rows(kind), table.rows(other)
        numbers, first, counts = np.unique(program.message[rows], return_index=True, return_counts=True)
        repeated = rows[~np.isin(np.arange(rows.size), first)]
        lonely = rows[first[~np.isin(numbers, program.message[others])]]

        def twice(row: int, kind: InstructionKind = kind) -> Diagnostic:
            message = f"two {kind.name} instructions have message number {program.message[row]}"
            return table.finding("S311", row, message)

        def alone(row: int, kind: InstructionKind = kind, other: InstructionKind = other) -> Diagnostic:
            message = f"message {program.message[row]} has a {kind.name} but no {other.name}"
            return table.finding("S311", row, message)

        found += table.findings(repeated, twice) if (counts > 1).any() else []
        found += table.findings(lonely, alone)
    return found


def _ends(table: ProgramTable) -> list[Diagnostic]:
    """S312: both ends of a message name the same ranks, channel, stage and microbatch."""
    program, send, receive = table.program, table.send, table.receive
    differs = {
        "the receiving rank": program.peer[send] != program.rank[receive],
        "the sending rank": program.rank[send] != program.peer[receive],
        "the channel": program.channel[send] != program.channel[receive],
        "the stage": program.stage[send] != program.stage[receive],
        "the microbatch": program.microbatch[send] != program.microbatch[receive],
    }
    wrong = np.flatnonzero(np.logical_or.reduce(list(differs.values())))

    def describe(index: int) -> Diagnostic:
        what = next(name for name, column in differs.items() if column[index])
        message = f"the ends of message {table.messages[index]} do not agree about {what}"
        return table.finding("S312", int(send[index]), message, (int(receive[index]),))

    return table.findings(wrong, describe)


def _needed(table: ProgramTable) -> list[Diagnostic]:
    """S316: there is exactly one message for each value that one rank produces and another consumes."""
    program, (producer, consumer) = table.program, table.flows
    slot = table.slot(table.send)
    rank = program.rank
    remote = (producer >= 0) & (rank[producer] != rank[consumer])
    right = (
        remote[slot] & (rank[producer[slot]] == rank[table.send]) & (rank[consumer[slot]] == program.peer[table.send])
    )
    order = np.argsort(slot, kind="stable")
    again = np.zeros(slot.size, bool)
    again[order[1:]] = slot[order[1:]] == slot[order[:-1]]
    needless = np.flatnonzero(~right | again)
    remote[slot] = False
    missing = np.flatnonzero(remote)

    def surplus(index: int) -> Diagnostic:
        message = f"message {table.messages[index]} carries what its receiver does not need, or has already"
        return table.finding("S316", int(table.send[index]), message)

    def absent(index: int) -> Diagnostic:
        channel, stage, microbatch = np.unravel_index(index, (2, program.stages, program.microbatches))
        value = f"the {channel_name(int(channel))} of microbatch {microbatch} from stage {stage}"
        message = f"no message brings {value} to rank {rank[consumer[index]]}"
        return table.finding("S316", int(consumer[index]), message, (int(producer[index]),))

    return table.findings(needless, surplus) + table.findings(missing, absent)


def _fifo(table: ProgramTable) -> list[Diagnostic]:
    """S313: between two ranks, one way on a communicator, messages are received in the order in which they are sent."""
    program, send, receive = table.program, table.send, table.receive
    source, destination = program.rank[send], program.peer[send]
    queue = (communicators_of(program), destination, source)
    sent, received = np.lexsort((send, *queue)), np.lexsort((receive, *queue))
    wrong = np.flatnonzero(sent != received)
    _, first = np.unique(source[sent[wrong]].astype(np.int64) * program.ranks + destination[sent[wrong]],
                         return_index=True)  # fmt: skip

    def describe(index: int) -> Diagnostic:
        one, other = int(sent[index]), int(received[index])
        message = (
            f"rank {source[one]} sends message {table.messages[one]} to rank {destination[one]} where that rank "
            f"receives message {table.messages[other]}"
        )
        return table.finding("S313", int(send[one]), message, (int(receive[other]),),
                             help="messages have no tags: post both ends in one order")  # fmt: skip

    return table.findings(wrong[first], describe)


def _batches(table: ProgramTable) -> list[Diagnostic]:
    """S314: a batch joins the same messages at both ends, in neighbouring instructions with one peer."""
    program, send, receive = table.program, table.send, table.receive
    uneven = np.flatnonzero(program.batch[send] != program.batch[receive])

    def one_sided(index: int) -> Diagnostic:
        message = f"message {table.messages[index]} is in a batch at one end and not in the same one at the other"
        return table.finding("S314", int(send[index]), message, (int(receive[index]),))

    rows = np.flatnonzero(program.batch >= 0)
    rows = rows[np.lexsort((rows, program.batch[rows], program.rank[rows]))]
    before, after = rows[:-1], rows[1:]
    together = (program.batch[before] == program.batch[after]) & (program.rank[before] == program.rank[after])
    split = after[together & ((after != before + 1) | (program.peer[before] != program.peer[after]))]

    def apart(row: int) -> Diagnostic:
        message = f"batch {program.batch[row]} is interrupted, or has two peers: a call cannot post it"
        return table.finding("S314", row, message)

    return table.findings(uneven, one_sided) + table.findings(split, apart)


def _waits(table: ProgramTable) -> list[Diagnostic]:
    """S315: a rank waits exactly once, later, for each message that it posted, and for no other."""
    program = table.program
    posts = np.sort(np.concatenate([table.send, table.receive]))
    waits = table.rows(WAIT)

    def key(rows: Int64) -> Int64:
        return program.rank[rows].astype(np.int64) * 2**32 + program.message[rows]

    posts, waits = (rows[np.argsort(key(rows), kind="stable")] for rows in (posts, waits))
    again = waits[1:][key(waits[1:]) == key(waits[:-1])]
    unknown = waits[~np.isin(key(waits), key(posts))]
    forgotten = posts[~np.isin(key(posts), key(waits))]
    counted = (
        (again, "waits twice for message {}"),
        (unknown, "waits for message {}, which it never posts"),
        (forgotten, "never waits for message {}, whose buffer would never be free"),
    )
    found = []
    for rows, text in counted:

        def describe_count(row: int, text: str = text) -> Diagnostic:
            message = f"rank {program.rank[row]} {text.format(program.message[row])}"
            return table.finding("S315", row, message)

        found += table.findings(rows, describe_count)
    if found:
        return found
    fields = (program.peer, program.channel, program.stage, program.microbatch, program.op)
    differs = np.logical_or.reduce([column[posts] != column[waits] for column in fields])
    wrong = np.flatnonzero((waits < posts) | differs)

    def describe(index: int) -> Diagnostic:
        row = int(waits[index])
        early = waits[index] < posts[index]
        what = "before it posts it" if early else "under another peer, channel, stage, microbatch or op"
        message = f"rank {program.rank[row]} waits for message {program.message[row]} {what}"
        return table.finding("S315", row, message, (int(posts[index]),))

    return table.findings(wrong, describe)


def _data(table: ProgramTable) -> list[Diagnostic]:
    """S317: a value is sent after it is computed, and has arrived before it is used."""
    program, (producer, consumer) = table.program, table.flows
    made = producer[table.slot(table.send)]
    early = np.flatnonzero(table.send < made)
    waits = table.rows(WAIT)
    waits = waits[np.isin(waits, _receive_waits(table))]
    used = consumer[table.slot(waits)]
    late = np.flatnonzero(waits > used)

    def unsent(index: int) -> Diagnostic:
        message = f"message {table.messages[index]} is sent before its value is computed"
        return table.finding("S317", int(table.send[index]), message, (int(made[index]),))

    def unready(index: int) -> Diagnostic:
        message = (
            f"rank {program.rank[waits[index]]} uses message {program.message[waits[index]]} before waiting for it"
        )
        return table.finding("S317", int(waits[index]), message, (int(used[index]),))

    return table.findings(early, unsent) + table.findings(late, unready)


def _receive_waits(table: ProgramTable) -> Int64:
    """Rows of the waits for received messages: waits on another rank than the SEND."""
    program, waits = table.program, table.rows(WAIT)
    number = np.searchsorted(table.messages, program.message[waits])
    return np.asarray(waits[program.rank[waits] != program.rank[table.send[number]]])


Invariant = Callable[[ProgramTable], list[Diagnostic]]
GROUPS: tuple[tuple[Invariant, ...], ...] = ((_numbers,), (_ends,), (_needed, _fifo, _batches), (_waits,), (_data,))
"""In this order: what a group has established the later ones use."""
