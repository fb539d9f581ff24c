"""Programs: what communication is inserted, that it runs under the strictest rules, and that damage is found."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.timeline import simulate
from schedc.compiler import compile as compile_schedule
from schedc.cost.costs import Costs
from schedc.diagnostics import DiagnosticError
from schedc.interchange.torch_csv import from_torch_csv
from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from schedc.ir.program import Instruction, InstructionKind, Program
from schedc.ir.schedule import Schedule
from schedc.ir.text import print_program
from schedc.ir.verify_program import verify_program
from schedc.load import library
from schedc.passes.insert_communication import insert_communication
from support.random_schedules import ORDERS, published, random_schedule

F, B, CELL = InstructionKind.F, InstructionKind.B, InstructionKind.CELL
SEND, RECV, WAIT, REDUCE = InstructionKind.SEND, InstructionKind.RECV, InstructionKind.WAIT, InstructionKind.REDUCE
NAMES = [path.stem.rsplit("_P4", 1)[0] for path in ORDERS]


def random_costs(seed: int, stages: int, p2p: float) -> Costs:
    draw = random.Random(seed)
    forward = tuple(draw.choice([0.0, 0.25, 1.0, 3.0]) for _ in range(stages))
    return Costs(F=forward, I=draw.choice([0.0, 0.5, 1.0]), W=draw.choice([0.0, 0.5, 2.0]), p2p=p2p)


# What is inserted.


def test_two_stages_by_hand() -> None:
    program = insert_communication(from_torch_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"))

    def lines(rank: int) -> list[str]:
        return [
            f"{i.kind.name} {i.stage}.{i.microbatch}" + (f" #{i.message}" * (i.message >= 0))
            for i in program.instructions(rank)
        ]

    assert lines(0) == [
        "F 0.0", "SEND 0.0 #0", "F 0.1", "SEND 0.1 #1", "RECV 1.0 #2", "RECV 1.1 #3", "WAIT 0.0 #0", "WAIT 1.0 #2",
        "B 0.0", "WAIT 0.1 #1", "WAIT 1.1 #3", "B 0.1",
    ]  # fmt: skip
    assert lines(1) == [
        "RECV 0.0 #0", "RECV 0.1 #1", "WAIT 0.0 #0", "F 1.0", "B 1.0", "SEND 1.0 #2", "WAIT 0.1 #1", "F 1.1",
        "WAIT 1.0 #2", "B 1.1", "SEND 1.1 #3", "WAIT 1.1 #3",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_published_orders_become_sound_programs(name: str) -> None:
    schedule = published(name)
    program = insert_communication(schedule)
    assert verify_program(program) == []
    home, first = schedule.placement.rank_of_stage, np.diff(schedule.placement.first_microbatch)
    hops = int(((home[:, 1:] != home[:, :-1]).sum(1) * first).sum())
    kinds = np.bincount(program.kind, minlength=len(InstructionKind))
    assert (kinds[SEND], kinds[RECV], kinds[WAIT]) == (2 * hops, 2 * hops, 4 * hops)
    assert kinds[CELL] == np.unique(schedule.pair[schedule.pair >= 0]).size
    assert kinds[REDUCE] == (8 if schedule.placement.pipes == 2 else 0)


@pytest.mark.parametrize("seed", range(60))
def test_any_legal_order_under_any_costs_becomes_a_sound_program(seed: int) -> None:
    schedule = random_schedule(seed)
    for p2p in (0.0, 0.3):
        program = insert_communication(schedule, random_costs(seed, schedule.stages, p2p))
        assert verify_program(program) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_posts_in_the_order_of_messages_and_waits_right_before_use(name: str) -> None:
    program = insert_communication(published(name))
    for rank in range(program.ranks):
        stream = list(program.instructions(rank))
        numbers = [item.message for item in stream if item.kind in (SEND, RECV)]
        received = {item.message for item in stream if item.kind is RECV}
        assert numbers == sorted(numbers)
        for at, item in enumerate(stream):
            if item.kind is WAIT and item.message in received:
                after = next(other for other in stream[at:] if other.kind is not WAIT)
                assert after.kind <= CELL
                assert after.op == item.op


def test_opposite_messages_of_one_moment_are_posted_by_one_call() -> None:
    program = insert_communication(published("1f1b"))
    batches: dict[int, list[Instruction]] = {}
    for rank in range(program.ranks):
        for item in program.instructions(rank):
            if item.batch >= 0:
                batches.setdefault(item.batch, []).append(item)
    assert len(batches) == 15
    for low, low2, high, high2 in batches.values():
        assert {low.rank, high.rank} == {low.peer, high.peer}
        assert {low.kind, low2.kind} == {high.kind, high2.kind} == {SEND, RECV}
        assert {low.channel, low2.channel} == {0, 1}


def test_an_instruction_knows_its_kind_and_its_halves() -> None:
    program = compile_schedule("dualpipe", P=2, M=4)
    instructions = [x for rank in range(2) for x in program.instructions(rank)]
    assert {x.kind_name for x in instructions} == {"F", "I", "W", "B", "FB", "SEND", "RECV", "WAIT", "REDUCE"}
    for x in instructions:
        pair = x.kind is InstructionKind.CELL
        assert x.computes == (x.kind_name in ("F", "I", "W", "B", "FB"))
        assert not pair or x._replace(backward=InstructionKind.I).kind_name == "FI"
        assert x.stages == ((x.stage, x.stage2) if pair else (x.stage,))
        assert x.backward_slot == ((x.stage2, x.microbatch2) if pair else (x.stage, x.microbatch))


def test_reductions_follow_from_the_placement() -> None:
    program = insert_communication(published("dualpipe"))
    found = [[(i.stage, i.peer, i.message) for i in program.instructions(r) if i.kind is REDUCE] for r in range(4)]
    assert found == [[(0, 3, 0), (3, 3, 1)], [(1, 2, 0), (2, 2, 1)], [(1, 1, 0), (2, 1, 1)], [(0, 0, 0), (3, 0, 1)]]
    assert all(program.kind[end - 1] == REDUCE for end in program.rank_start[1:])


def test_three_copies_of_a_stage_are_refused() -> None:
    schedule = from_torch_csv("0F0,0B0\n0F1,0B1\n0F2,0B2\n")
    with pytest.raises(DiagnosticError) as error:
        insert_communication(schedule)
    assert [d.code for d in error.value.diagnostics] == ["S302"]


def test_one_rank_needs_no_messages() -> None:
    program = insert_communication(from_torch_csv("0F0,1F0,2F0,2B0,1B0,0I0,0W0\n"))
    assert [i.kind for i in program.instructions(0)] == [F, F, F, B, B, InstructionKind.I, InstructionKind.W]


# What it costs: with free messages, a run under rendezvous and in-order completion takes the simulated time.


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


def assert_runs_as_simulated(schedule: Schedule, costs: Costs) -> None:
    cells = Dependencies.of(schedule)
    timeline = simulate(schedule, costs, cells)
    length = timeline.end - timeline.start

    def duration(rank: int, cell: int) -> float:
        return float(length[cells.rank_start[rank] + cell])

    # Messages of one rank that follow each other at once share its link, which the timeline does not model.
    clock = Clock(insert_communication(schedule, costs), duration, costs.p2p, in_order=costs.p2p == 0)
    assert clock.makespan() == pytest.approx(timeline.makespan)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p2p", [0.0, 0.3])
def test_posts_and_waits_cost_no_time(name: str, p2p: float) -> None:
    assert_runs_as_simulated(published(name), Costs(p2p=p2p))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("p2p", [0.0, 0.3])
def test_posts_and_waits_cost_no_time_under_any_costs(seed: int, p2p: float) -> None:
    schedule = random_schedule(seed)
    assert_runs_as_simulated(schedule, random_costs(seed, schedule.stages, p2p))


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
    """A random instruction that is ``wanted``: its stream and its place in it."""
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
    """Another value in one field of one instruction, in its range."""

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


@pytest.mark.parametrize("seed", range(10))
def test_any_moved_post_is_refused_or_harmless(seed: int) -> None:
    """A post moved anywhere: whatever the checks accept runs to its end in the independent clock above."""
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


# The library.


def compile_if_allowed(name: str, ranks: int, microbatches: int) -> Program | None:
    """None at sizes that the schedule's `require` lines rule out."""
    try:
        return compile_schedule(name, P=ranks, M=microbatches)
    except DiagnosticError as error:
        if {diagnostic.code[:2] for diagnostic in error.diagnostics} != {"S1"}:
            raise
        return None


@pytest.mark.parametrize("name", library.names())
def test_library_schedules_become_sound_programs_that_come_back_equal(name: str) -> None:
    made = 0
    for ranks in (1, 2, 3, 4, 6):
        for microbatches in (1, 2, ranks, 2 * ranks, 2 * ranks + 3, 20):
            program = compile_if_allowed(name, ranks, microbatches)
            if program is None:
                continue
            made += 1
            assert load_program(program_to_json(program), name) == program
            assert load_program(print_program(program), name) == program
    assert made >= 6
