"""Damaged programs: each damage is refused with its code, and what is not refused runs to its end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from compiler.ir.program_cases import CELL, NAMES, RECV, REDUCE, SEND, WAIT, B, Clock, F
from schedc.interchange.torch_csv import from_torch_csv
from schedc.ir.program import InstructionKind, Program
from schedc.ir.verify_program import verify_program
from schedc.step.program.insert_communication import insert_communication
from support.random_schedules import published, random_schedule

# Damage: every operator is applied at many places, and each damaged program is refused with one of its codes.

Row = dict[str, int]
Streams = list[list[Row]]
COLUMNS = ("kind", "stage", "microbatch", "stage2", "microbatch2", "backward", "peer", "channel", "message", "batch",
           "op", "phase", "span")  # fmt: skip


def streams_of(program: Program) -> Streams:
    columns = [getattr(program, name).tolist() for name in COLUMNS]
    rows = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*columns, strict=True)]
    return [rows[program.rank_start[r] : program.rank_start[r + 1]] for r in range(program.ranks)]


def with_streams(program: Program, streams: Streams) -> Program:
    rows = [row for stream in streams for row in stream]
    columns = {name: np.array([row[name] for row in rows], getattr(program, name).dtype) for name in COLUMNS}
    return replace(program, rank_start=np.cumsum([0, *map(len, streams)]).astype(np.int64), **columns)


def find(streams: Streams, draw: random.Random, wanted: Callable[[Row], bool]) -> tuple[list[Row], int]:
    """A random instruction that is ``wanted``: the stream, and the place there."""
    return draw.choice([(stream, at) for stream in streams for at, row in enumerate(stream) if wanted(row)])


def is_kind(*kinds: InstructionKind) -> Callable[[Row], bool]:
    return lambda row: row["kind"] in kinds


def drop(*kinds: InstructionKind) -> Callable[[Streams, random.Random], None]:
    def damage(streams: Streams, draw: random.Random) -> None:
        stream, at = find(streams, draw, is_kind(*kinds))
        del stream[at]

    return damage


def double(*kinds: InstructionKind) -> Callable[[Streams, random.Random], None]:
    def damage(streams: Streams, draw: random.Random) -> None:
        stream, at = find(streams, draw, is_kind(*kinds))
        stream.insert(draw.randint(0, len(stream)), dict(stream[at]))

    return damage


def alter(field: str, *kinds: InstructionKind) -> Callable[[Streams, random.Random], None]:
    """Another value in a field of an instruction, in range."""

    def damage(streams: Streams, draw: random.Random) -> None:
        stream, at = find(streams, draw, is_kind(*kinds))
        values = {row[field] for other in streams for row in other if row[field] >= 0} - {stream[at][field]}
        stream[at][field] = draw.choice(sorted(values))

    return damage


def alter_everywhere(field: str) -> Callable[[Streams, random.Random], None]:
    """The same wrong value in all four instructions of a message."""

    def damage(streams: Streams, draw: random.Random) -> None:
        stream, at = find(streams, draw, is_kind(SEND))
        message, value = stream[at]["message"], stream[at][field]
        for row in (row for other in streams for row in other if row["kind"] in (SEND, RECV, WAIT)):
            if row["message"] == message:
                row[field] = value + (1 if value == 0 else -1)

    return damage


def move(from_kind: InstructionKind, behind: bool) -> Callable[[Streams, random.Random], None]:
    """A SEND before its producer; a WAIT for a receive behind its consumer."""

    def damage(streams: Streams, draw: random.Random) -> None:
        def wanted(row: Row) -> bool:
            sent = {r["message"] for s in streams if any(r is row for r in s) for r in s if r["kind"] == SEND}
            return row["kind"] == from_kind and (from_kind == SEND or row["message"] not in sent)

        stream, at = find(streams, draw, wanted)
        row = stream.pop(at)
        served = next(i for i, other in enumerate(stream) if other["kind"] <= CELL and other["op"] == row["op"])
        row["batch"] = -1
        stream.insert(served + behind, row)

    return damage


def swap_sends(streams: Streams, draw: random.Random) -> None:
    """Two sends to one peer change places, and with them the order at one end only."""
    stream, at = find(streams, draw, is_kind(SEND))
    others = [i for i, row in enumerate(stream)
              if row["kind"] == SEND and row["peer"] == stream[at]["peer"] and i != at]  # fmt: skip
    other = draw.choice(others)
    stream[at], stream[other] = stream[other], stream[at]


def swap_receives(streams: Streams, draw: random.Random) -> None:
    stream, at = find(streams, draw, is_kind(RECV))
    later = [i for i, row in enumerate(stream) if row["kind"] == RECV and row["peer"] == stream[at]["peer"] and i != at]
    other = draw.choice(later)
    stream[at], stream[other] = stream[other], stream[at]


def wait_first(streams: Streams, draw: random.Random) -> None:
    stream, at = find(streams, draw, is_kind(WAIT))
    post = next(i for i, row in enumerate(stream) if row["message"] == stream[at]["message"])
    stream.insert(post, stream.pop(at))


def split_batch(streams: Streams, draw: random.Random) -> None:
    stream, at = find(streams, draw, lambda row: row["batch"] >= 0)
    stream[at]["batch"] = -1


def interrupt_batch(streams: Streams, draw: random.Random) -> None:
    stream, at = find(streams, draw, lambda row: row["batch"] >= 0)
    mate = next(i for i, row in enumerate(stream) if row["batch"] == stream[at]["batch"] and i != at)
    cell = next(i for i, row in enumerate(stream) if row["kind"] <= CELL and i > max(at, mate))
    stream.insert(cell + 1, stream.pop(max(at, mate)))


def swap_reductions(streams: Streams, draw: random.Random) -> None:
    stream, at = find(streams, draw, is_kind(REDUCE))
    other = next(i for i, row in enumerate(stream) if row["kind"] == REDUCE and i != at)
    stream[at], stream[other] = stream[other], stream[at]


DAMAGE: dict[str, tuple[Callable[[Streams, random.Random], None], set[str]]] = {
    "drop SEND": (drop(SEND), {"S311"}),
    "drop RECV": (drop(RECV), {"S311"}),
    "drop WAIT": (drop(WAIT), {"S315"}),
    "drop REDUCE": (drop(REDUCE), {"S318"}),
    "drop compute": (drop(F, B), {"S203"}),
    "double SEND": (double(SEND), {"S311"}),
    "double RECV": (double(RECV), {"S311"}),
    "double WAIT": (double(WAIT), {"S314", "S315"}),
    "double compute": (double(F, B), {"S204", "S205"}),
    "wrong peer": (alter("peer", SEND, RECV), {"S312", "S319"}),
    "wrong peer of a wait": (alter("peer", WAIT), {"S315", "S319"}),
    "wrong peer of a reduction": (alter("peer", REDUCE), {"S318", "S319"}),
    "wrong stage": (alter("stage", SEND, RECV), {"S312"}),
    "wrong microbatch": (alter("microbatch", SEND, RECV), {"S312"}),
    "wrong channel": (alter("channel", SEND, RECV), {"S312"}),
    "wrong message": (alter("message", SEND, RECV), {"S311"}),
    "wrong op": (alter("op", SEND, RECV), {"S315", "S319"}),
    "wrong microbatch at all ends": (alter_everywhere("microbatch"), {"S316"}),
    "wrong channel at all ends": (alter_everywhere("channel"), {"S316"}),
    "wrong stage of a computation": (alter("stage", F, B), {"S202", "S203", "S205"}),
    "send before it is computed": (move(SEND, False), {"S313", "S314", "S317"}),
    "wait after it is used": (move(WAIT, True), {"S317"}),
    "swap sends": (swap_sends, {"S313", "S314", "S315"}),
    "swap receives": (swap_receives, {"S313", "S314", "S315"}),
    "wait before the post": (wait_first, {"S314", "S315"}),
    "split batch": (split_batch, {"S314"}),
    "interrupt batch": (interrupt_batch, {"S313", "S314"}),
    "swap reductions": (swap_reductions, {"S318"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_with_the_right_code(name: str) -> None:
    damage, codes = DAMAGE[name]
    draw = random.Random(name)
    program = insert_communication(published("dualpipe"))
    for _ in range(25):
        streams = streams_of(program)
        damage(streams, draw)
        findings = verify_program(with_streams(program, streams))
        assert findings
        assert {finding.code for finding in findings} <= codes


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_posts_is_safe_even_if_every_post_blocks(name: str) -> None:
    program = insert_communication(published(name))
    streams = streams_of(program)
    for stream in streams:
        for row in [row for row in stream if row["kind"] in (SEND, RECV)]:
            wait = next(i for i, r in enumerate(stream) if r["kind"] == WAIT and r["message"] == row["message"])
            moved = stream.pop(wait)
            stream.insert(next(i for i, r in enumerate(stream) if r is row) + 1, moved)
            row["batch"] = -1
    assert verify_program(with_streams(program, streams)) == []


def test_head_on_sends_stall_and_are_shown_as_the_shortest_circle() -> None:
    program = insert_communication(from_torch_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", file="order.csv"))
    streams = streams_of(program)
    for rank, (sent, received) in enumerate([(1, 2), (2, 1)]):
        stream = streams[rank]
        for kind, message in ((WAIT, sent), (RECV, received)):  # SEND, WAIT for it, and only then RECV
            row = stream.pop(next(i for i, r in enumerate(stream) if r["kind"] == kind and r["message"] == message))
            send = next(i for i, r in enumerate(stream) if r["kind"] == SEND and r["message"] == sent)
            stream.insert(send + (1 if kind is WAIT else 2), row)
    finding = verify_program(with_streams(program, streams))[0]
    assert finding.position == ("S310", 2, 5)
    assert finding.notes == (
        "the shortest circle: rank 1 waits <- rank 0 waits <- rank 1 waits",
        "rank 1 stands at WAIT of the gradient of microbatch 0 from stage 1 with rank 0 (message 2; rank 1, "
        "instruction 5) for order.csv:2:5, before RECV of the activation of microbatch 1 from stage 0 from rank 0 "
        "(message 1; rank 1, instruction 6)",
        "rank 0 stands at WAIT of the activation of microbatch 1 from stage 0 with rank 1 (message 1; rank 0, "
        "instruction 4) for order.csv:1:5, before RECV of the gradient of microbatch 0 from stage 1 from rank 1 "
        "(message 2; rank 0, instruction 5)",
    )


def test_posts_in_another_order_stall_where_messages_complete_in_order() -> None:
    program = insert_communication(from_torch_csv("0F0,0B0\n1F0,1B0\n2F0,2B0\n"))
    streams = streams_of(program)
    gradient = next(i for i, row in enumerate(streams[1]) if row["kind"] == RECV and row["stage"] == 2)
    streams[1].insert(0, streams[1].pop(gradient))
    finding = verify_program(with_streams(program, streams))[0]
    assert finding.code == "S310"
    assert finding.notes[0] == "the shortest circle: rank 1 waits <- rank 2 waits <- rank 1 waits"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_any_moved_post_is_refused_or_harmless(seed: int) -> None:
    """A post moved anywhere: whatever the checks accept runs to its end in an independent clock."""
    draw = random.Random(seed)
    program = insert_communication(random_schedule(seed))
    if not (program.kind == SEND).any():
        return
    for _ in range(30):
        streams = streams_of(program)
        stream, at = find(streams, draw, is_kind(SEND, RECV, WAIT))
        stream.insert(draw.randrange(len(stream)), stream.pop(at))
        moved = with_streams(program, streams)
        if not verify_program(moved):
            assert Clock(moved, lambda rank, cell: 1.0).makespan() > 0
