"""Programs: inserted communication, which runs under the strictest rules."""

from __future__ import annotations

import random

import numpy as np
import pytest

from compiler.ir.program_cases import CELL, NAMES, RECV, REDUCE, SEND, WAIT, B, Clock, F
from schedc.compiler import compile as compile_schedule
from schedc.diagnostics import DiagnosticError
from schedc.interchange.torch_csv import from_torch_csv
from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from schedc.ir.program import Instruction, InstructionKind, Program
from schedc.ir.schedule import Schedule
from schedc.ir.text import print_program
from schedc.ir.verify_program import verify_program
from schedc.load import library
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import simulate
from support.random_schedules import published, random_schedule
from support.sweeps import swept, thinned


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


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("seed", thinned(range(60), 3))
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
        assert x.last_slot == ((x.stage2, x.microbatch2) if pair else (x.stage, x.microbatch))


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("p2p", [0.0, 0.3])
def test_posts_and_waits_cost_no_time_under_any_costs(seed: int, p2p: float) -> None:
    schedule = random_schedule(seed)
    assert_runs_as_simulated(schedule, random_costs(seed, schedule.stages, p2p))


# The library.


def compile_if_allowed(name: str, ranks: int, microbatches: int) -> Program | None:
    """None at sizes that the schedule's `require` lines rule out."""
    try:
        return compile_schedule(name, P=ranks, M=microbatches)
    except DiagnosticError as error:
        if {diagnostic.code[:2] for diagnostic in error.diagnostics} != {"S1"}:
            raise
        return None


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", thinned(library.names(), 3))
def test_library_schedules_become_sound_programs_that_come_back_equal(name: str) -> None:
    made = 0
    for ranks in swept((1, 2, 3, 4, 6), (1, 2, 4)):
        for microbatches in swept((1, 2, ranks, 2 * ranks, 2 * ranks + 3, 20), (2, 2 * ranks, 2 * ranks + 3)):
            program = compile_if_allowed(name, ranks, microbatches)
            if program is None:
                continue
            made += 1
            assert load_program(program_to_json(program), name) == program
            assert load_program(print_program(program), name) == program
    assert made >= swept(6, 2)
