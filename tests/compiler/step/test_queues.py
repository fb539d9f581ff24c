"""Messages that queue on communicators: times, the choice of communicators, deadlocks, forms and reports."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

import schedc
from compiler.ir.program_cases import Clock
from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.interchange.targets import TARGETS
from schedc.interchange.torch_lowered import to_lowered_csv
from schedc.ir import rendezvous
from schedc.ir.communicators import ASSIGNMENTS, Ends, ranks_of_communicators, sends_of
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import EVERY_COLUMN, InstructionKind, Program
from schedc.ir.text import parse_program, print_program
from schedc.ir.verify_program import verify_program
from schedc.ir.works import WorkKind
from schedc.plan.passes import lower
from schedc.plan.writer import read_plan, write_plan
from schedc.step.costs.costs import Costs, load_costs
from schedc.step.costs.lanes import LaneEngine
from schedc.step.dependencies import Dependencies
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.insert_works import insert_works
from schedc.step.program.queues import QueuedProgram, choose_communicators, queued_messages
from schedc.step.timeline import durations
from schedc.step.work_runs import run_with_works
from support.paths import ROOT
from support.random_schedules import random_schedule
from support.random_works import placed_under, random_replica_works

COSTS = Costs(F=10.0, I=10.0, W=10.0, p2p=2.0)


@pytest.fixture
def benchmark() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import communicators

        yield communicators
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def compiled(name: str, ranks: int = 4, costs: Costs | None = None) -> Program:
    return schedc.compile(name, costs=costs, P=ranks, M=2 * ranks)


# Times.


@pytest.mark.parametrize("seed", range(12))
def test_times_are_those_of_an_independent_clock(seed: int) -> None:
    """Under each assignment and under numbers at random; whole numbers, so that both are exact."""
    draw = random.Random(seed)
    schedule = random_schedule(seed)
    costs = Costs(F=3.0, I=2.0, W=draw.choice([1.0, 5.0]), p2p=float(draw.choice([0, 1, 4])))
    program, cells = insert_communication(schedule), Dependencies.of(schedule)
    length = durations(cells, costs.resolved(schedule.stages))

    def clock(program: Program, in_order: bool = True) -> float:
        run = Clock(program, lambda rank, cell: length[cells.rank_start[rank] + cell], costs.p2p, in_order)
        run.makespan()
        return run.ended

    queued = QueuedProgram.of(program, costs)
    program = replace(program, communicators=program.communicators[:0])
    assert queued.makespan(None) == clock(program, in_order=False)
    for name in ASSIGNMENTS:
        numbers = queued.ends.assigned(name)
        assert queued.makespan(numbers) == clock(replace(program, communicators=numbers))
    numbers = np.array([draw.randrange(3) for _ in range(queued.batch.size)], np.int32)
    if not verify_program(replace(program, communicators=np.unique(numbers, return_inverse=True)[1])):
        assert queued.makespan(numbers) == clock(replace(program, communicators=numbers))


@pytest.mark.parametrize("seed", [0, 1, 4, 6, 9, 12])
def test_works_queue_on_their_lanes_as_in_the_timeline(seed: int) -> None:
    """With each message alone the step is that of `run_with_works`, also where lanes slow cells down."""
    draw = random.Random(seed)
    schedule = random_schedule(seed)
    slow = (LaneEngine("d2h", "copy", (("copy", 0.5),)), LaneEngine("dp", "sm", (("sm", 0.25),)))
    costs = Costs(F=3.0, I=2.0, W=draw.choice([1.0, 5.0]), p2p=1.0, lanes=slow * (seed % 2))
    cells, of_stages = Dependencies.of(schedule), costs.resolved(schedule.stages)
    placed = placed_under(cells, costs, float(draw.randint(0, 2)), 1.0)
    placed = placed.beside(random_replica_works(cells, costs, draw))
    time = np.array([draw.randint(0, 6) for _ in range(len(placed))]) * (placed.works.kind != WorkKind.DROP)
    times = run_with_works(cells, durations(cells, of_stages), costs.p2p, placed, time, of_stages.slowdown)
    program = insert_works(insert_communication(schedule, costs), cells, placed, time, costs)
    queued = QueuedProgram.of(program, costs, time)
    assert queued.makespan(None) == times.closed.max() > times.end.max()
    chosen = choose_communicators(queued)
    assert (
        (program.communicators == chosen.communicator).all() if chosen.per_rank > 1 else not program.communicators.size
    )


@pytest.mark.parametrize("name", ["1f1b", "interleaved_overlap", "dualpipev"])
def test_messages_are_ordered_and_queue_by_times_inside_cells(name: str) -> None:
    """Exchanges of experts lie inside cells. Ordered by times of ops alone, one communicator costs 14 % and more."""
    costs = Costs.from_options(["p2p=4"], load_costs(ROOT / "examples" / "costs" / "moe2_85.toml"))
    step = lower(analyse(name, {"P": 4, "M": 8}, costs), "communicators")
    assert step.inside is not None
    chosen, alone = step.communicators, step.inside.overlapped.makespan
    assert chosen.alone == alone
    assert chosen.one < 1.01 * alone
    by_ops = QueuedProgram.of(insert_communication(step.schedule, costs), costs, None, step.inside.closed.duration)
    assert by_ops.makespan(by_ops.ends.assigned("one")) > 1.14 * alone
    program = step.instructions
    assert np.array_equal(program.communicators, chosen.communicator if chosen.per_rank > 1 else [])
    assert program_from_json(TARGETS["json"].write(step.schedule, step.costs)) == program


def test_figures_of_the_benchmark(benchmark: ModuleType) -> None:
    """The same functions at 4 ranks, and the published times of two schedules at 8."""
    assert benchmark.steps(4, ["dualpipev"])[:2] == (17, [])
    for name in ("interleaved_overlap", "dualpipe"):
        queued = QueuedProgram.of(benchmark.compiled(name, 8, None), COSTS)
        times = [queued.makespan(None), *(queued.makespan(queued.ends.assigned(n)) for n in benchmark.COLUMNS[1:])]
        assert times == list(benchmark.TABLE[name])


# Deadlocks.


def test_early_receives_deadlock_where_they_share_a_queue_with_sends(benchmark: ModuleType) -> None:
    early = benchmark.earlier_receives(compiled("zbv"))
    ends = Ends.of(early)
    [finding] = verify_program(replace(early, communicators=ends.assigned("pair")))
    assert finding.code == "S324"
    assert finding.notes[0].startswith("the shortest circle: rank ")
    assert finding.help.endswith(", or assign communicators by edge")
    assert not verify_program(replace(early, communicators=ends.assigned("edge")))


def test_receives_may_cross_on_two_communicators_and_not_on_one() -> None:
    """On rank 1 the second activation is received before the first one."""
    program = compiled("gpipe", 2)
    rows = np.flatnonzero((program.kind == InstructionKind.RECV) & (program.rank == 1))[:2]
    order = np.arange(len(program))
    order[rows[0] : rows[1] + 1] = [rows[1], *range(rows[0], rows[1])]
    columns = {name: getattr(program, name)[order] for name in ("kind", *EVERY_COLUMN)}
    crossed = replace(program, **columns)
    numbers = np.zeros(Ends.of(program).source.size, np.int32)
    assert [finding.code for finding in verify_program(crossed)] == ["S313"]
    numbers[int(program.message[rows[1]])] = 1
    assert not verify_program(replace(crossed, communicators=numbers))


@pytest.mark.parametrize("numbers", [[0], [0, 8] * 4, [-1] * 8])
def test_numbers_that_are_none(numbers: list[int]) -> None:
    program = replace(compiled("gpipe", 2), communicators=np.array(numbers, np.int32))
    assert [finding.code for finding in verify_program(program)] == ["S319"]


def test_a_batch_is_an_item_of_each_queue() -> None:
    program = compiled("dualpipev")
    rows = sends_of(program)
    joined = np.flatnonzero(program.batch[rows] >= 0)
    for assignment, items in (("one", joined.size // 2), ("edge", joined.size)):
        sends, item = rendezvous._items(program, rows, Ends.of(program).assigned(assignment))
        assert np.unique(item[np.isin(sends, rows[joined])]).size == items > 0


@pytest.mark.parametrize("seed", range(24))
def test_messages_that_take_no_time_never_wait_in_one_queue(seed: int) -> None:
    """The program is ordered by the same costs. No communicators are chosen for it."""
    draw, schedule = random.Random(seed), random_schedule(seed)
    own = ([draw.choice([1.0, 2.0, 3.0, 7.0, 20.0]) for _ in range(schedule.stages)] for _ in "FIW")
    costs = Costs(*map(tuple, own))
    program = insert_communication(schedule, costs)
    assert queued_messages(program, costs) is None
    queued = QueuedProgram.of(program, costs)
    assert queued.makespan(queued.ends.assigned("one")) == queued.makespan(None)


# The choice.


def test_the_smallest_assignment_that_costs_nothing_is_chosen() -> None:
    queued = QueuedProgram.of(compiled("dualpipe", 8), COSTS)
    chosen = choose_communicators(queued)
    assert (chosen.name, chosen.per_rank) == ("direction and channel", 4)
    assert (chosen.makespan, chosen.alone, chosen.one) == (594.0, 594.0, 622.0)
    few = choose_communicators(queued, 2)
    assert (few.name, few.makespan) == ("channel", 604.0)
    assert choose_communicators(queued, 1).name == "one"
    near = QueuedProgram.of(compiled("vmin", 8, COSTS), COSTS)
    assert (choose_communicators(near).name, near.makespan(near.ends.assigned("one"))) == ("direction", 1446.0)
    looped = QueuedProgram.of(compiled("interleaved_1f1b", 8), COSTS)
    assert looped.makespan(looped.ends.assigned("direction")) == 1328.0  # on a ring the last rank sends down
    edges = replace(compiled("dualpipe", 8), communicators=queued.ends.assigned("edge"))
    ranks = ranks_of_communicators(edges)
    assert sorted(ranks) == sorted([a, a + 1] for a in range(7) for _ in range(2))


def test_programs_carry_communicators_only_where_one_is_not_enough() -> None:
    assert not compiled("1f1b", 4, COSTS).communicators.size
    assert '"communicators"' not in program_to_json(compiled("1f1b", 4, COSTS))
    program = compiled("dualpipev", 4, COSTS)
    assert (program.communicators == Ends.of(program).assigned("channel")).all()
    assert program_from_json(program_to_json(program)) == program
    assert program_from_npz(program_to_npz(program)) == program
    assert parse_program(print_program(program)) == program
    assert program != replace(program, communicators=program.communicators[:0])


# Plans and reports.


def test_a_plan_limits_communicators(tmp_path: Path) -> None:
    file = tmp_path / "few.sched"
    text = "sched 1\nplan few = dualpipev(P = 4, M = 8) {\n  layers 8\n  communicators N\n}\n"
    for most, count in ((1, 0), (2, 2)):
        file.write_text(text.replace("N", str(most)), encoding="utf-8")
        program = schedc.compile(file, costs=COSTS)
        assert np.unique(program.communicators).size == count
        assert read_plan(write_plan(program.plan), program.stages) == program.plan
    for wrong in ("0", "1.5", "2 drop probs"):
        file.write_text(text.replace("N", wrong), encoding="utf-8")
        with pytest.raises(DiagnosticError) as error:
            schedc.compile(file)
        assert [finding.code for finding in error.value.diagnostics] == ["S146"]


def test_check_tells_what_one_communicator_costs(tmp_path: Path) -> None:
    costs = [f"--cost={name}" for name in ("F=10", "I=10", "W=10", "p2p=2")]

    def checked(*arguments: str) -> list[str]:
        output = CliRunner().invoke(main, ["check", *arguments, *costs], catch_exceptions=False).output
        return [line for line in output.splitlines() if line.startswith("messages")]

    assert checked("1f1b") == []
    assert checked("interleaved_overlap", "-D", "P=8", "-D", "M=16") == [
        "messages: 2 communicators (pair); one would take 4.4 % longer"
    ]
    file = tmp_path / "theirs.csv"
    file.write_text(to_lowered_csv(compiled("interleaved_overlap", 8)), encoding="utf-8")
    assert checked(str(file)) == [
        "messages as this file posts them: one communicator takes 22.5 % longer than 4 communicators (edge)"
    ]
