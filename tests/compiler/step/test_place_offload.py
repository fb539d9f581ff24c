"""Offloads under a cap: figures of an independent prototype, the memory of every row by hand, and damaged programs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import EVERY_COLUMN, InstructionKind, Program
from schedc.ir.schedule import Schedule
from schedc.ir.text import parse_program, print_program
from schedc.ir.verify_program import verify_program
from schedc.ir.works import WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory, without
from schedc.step.placed_works import PlacedWorks, order_of
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.insert_works import insert_works
from schedc.step.timeline import durations, run_durations
from schedc.step.work_runs import run_with_works
from support.random_schedules import random_schedule, with_recomputation
from support.random_works import placed_under, random_replica_works
from support.sweeps import swept

START, JOIN = InstructionKind.START, InstructionKind.JOIN


def schedule_of(name: str, **sizes: int) -> Schedule:
    return legal_schedule(open_input(name), sizes)


@pytest.mark.parametrize(
    ("name", "sizes", "cap", "moved", "longer"),
    [
        ("1f1b", {"P": 8, "M": 32}, 6, (13, 52), {0.5: (1.077, 1.0), 1.0: (1.154, 1.0), 1.5: (1.231, 1.0)}),
        ("1f1b", {"P": 8, "M": 32}, 4, (52, 139), {0.5: (1.145, 1.0), 1.0: (1.299, 1.0), 1.5: (1.440, 1.009)}),
        ("dualpipev", {"P": 8, "M": 32}, 10, (152, 201), {0.5: (1.131, 1.0), 1.0: (1.262, 1.0), 1.5: (1.398, 1.032)}),
        ("interleaved_1f1b", {"P": 4, "M": 16}, 7, (18, 40), {0.5: (1.0, 1.0), 1.0: (1.048, 1.0), 1.5: (1.095, 1.0)}),
    ],
)
def test_steps_under_a_cap_take_as_long_as_a_prototype_measured(
    name: str, sizes: dict[str, int], cap: int, moved: tuple[int, int], longer: dict[float, tuple[float, float]]
) -> None:
    """Makespan over that without a cap, and moves, with 0 and 2 places kept free; by the time of a move."""
    schedule, costs = schedule_of(name, **sizes), Costs()
    dependencies = Dependencies.of(schedule)
    duration = durations(dependencies, costs.resolved(schedule.stages))
    uncapped = run_durations(dependencies, duration, 0.0)[1].max()
    for move, expected in longer.items():
        for column, kept_free in enumerate((0, 2)):
            placed = placed_under(dependencies, costs, cap, move, kept_free)
            lanes = run_with_works(dependencies, duration, 0.0, placed, placed.works.bytes * move)
            assert lanes.end.max() / uncapped <= expected[column] + 5e-4
            if move == 0.5:
                assert len(placed) == 2 * moved[column]
            held = without(measure_memory(schedule, costs, dependencies), placed)
            assert held.peak_memory.max() <= cap


class ReplicaStates:
    """What a rank has of its stages beside activations, walked by hand: parameters, and how far each sum is."""

    def __init__(self, program: Program, rank: int) -> None:
        own = set(program.work[program.rank == rank].tolist()) - {-1}
        self.works, self.sound = program.works, True
        self.gathered = {self.works.work(work).stage for work in own if self.works.kind[work] == WorkKind.GATHER}
        self.left: Counter[int] = Counter()
        for row in program.instructions(rank):
            self.left.update(stage for kind, stage, _ in (row.ops if row.computes else ()) if FACTS[kind].weight)
        self.parameters, self.sums, self.ended = Counter[int](), Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def compute(self, kind: OpKind, stage: int) -> None:
        self.sound &= stage not in self.gathered or self.parameters[stage] == 2
        self.left[stage] -= FACTS[kind].weight

    def meet(self, number: int, half: InstructionKind) -> float:
        """Goes on by a START or JOIN; returns the memory that it adds."""
        work = self.works.work(number)
        starts, total = half is START, (work.stage, int(work.group))
        if work.kind in (WorkKind.GATHER, WorkKind.DROP):
            phase = (0 if work.kind is WorkKind.GATHER else 2) + (not starts)
            self.sound &= self.parameters[work.stage] == phase
            self.parameters[work.stage] = (phase + 1) % 4
        else:
            phase = (0 if work.kind is WorkKind.SCATTER else 2) + (not starts)
            self.sound &= self.sums[total] == phase and self.left[work.stage] == 0 and not self.ended[total]
            self.sums[total] = (phase + 1) % 4
            self.ended[total] += phase == 3
        adds = work.kind in (WorkKind.GATHER, WorkKind.SCATTER)
        return work.bytes * (adds - (not adds)) * (adds is starts)

    @property
    def at_rest(self) -> bool:
        return not any(self.parameters.values()) and not any(self.sums.values())


def replayed(program: Program, sizes: dict[int, float]) -> tuple[bool, list[float], list[float]]:
    """Whether no op and no work finds activations where they are not, and [n] memory behind every row, by hand.

    Memory is that of the device, then that of the host. sizes: memory of an activation by stage. A rank's rows run in
    order, so one walk over each is every run.
    """
    sound, memory, host = True, [], []
    for rank in range(program.ranks):
        held, there, where, open_works = 0.0, 0.0, Counter[tuple[int, int]](), set()
        done = set()
        stages = ReplicaStates(program, rank)
        for row in program.instructions(rank):
            slot = (row.stage, row.microbatch)
            if row.kind in (START, JOIN):
                work = program.works.work(row.work)
                if work.microbatch < 0:
                    held += stages.meet(row.work, row.kind)
                    memory.append(held)
                    host.append(there)
                    continue
                slot = (work.stage, work.microbatch)
                comes = work.kind is WorkKind.FETCH
                sound &= (row.stage, row.microbatch) == slot and (row.work in open_works) == (row.kind is JOIN)
                if row.kind is START:
                    sound &= where[slot] == (3 if comes else 1) and row.work not in done
                    open_works.add(row.work)
                    where[slot] = 4 if comes else 2
                    held += work.bytes * comes
                    there += work.bytes * (not comes)
                else:
                    sound &= where[slot] == (4 if comes else 2)
                    open_works.discard(row.work)
                    done.add(row.work)
                    where[slot] = 1 if comes else 3
                    held -= work.bytes * (not comes)
                    there -= work.bytes * comes
            for kind, stage, microbatch in row.ops if row.computes else ():
                stages.compute(kind, stage)
                slot = (stage, microbatch)
                if kind is OpKind.F:
                    where[slot], held = 1, held + sizes[stage]
                elif FACTS[kind].backward or kind is OpKind.R:
                    sound &= where[slot] == 1
                held -= sizes[stage] * FACTS[kind].weight
            memory.append(held)
            host.append(there)
        sound &= (
            stages.sound
            and stages.at_rest
            and not open_works
            and not any(state in (2, 3, 4) for state in where.values())
        )
    return sound, memory, host


def most_by_gap(program: Program, values: list[float], from_cells: bool) -> list[float]:
    """[gaps] the most of ``values`` [n] behind the rows of each gap; from_cells: with the rest of the cell before.

    Without that a gap begins with what the gap before it has left.
    """
    most = []
    for rank in range(program.ranks):
        most.append(0.0)
        begins = 0.0
        for row in range(program.rank_start[rank], program.rank_start[rank + 1]):
            if program.kind[row] <= InstructionKind.CELL:
                most.append(values[row] if from_cells else begins)
            elif program.work[row] >= 0:
                most[-1] = max(most[-1], values[row])
            begins = values[row]
    return most


def damaged(program: Program, rng: random.Random) -> Program:
    """The program with one fault near its works: a row moved, left out or given twice, or another work in its place."""
    rows = list(range(len(program)))
    starts = program.rank_start.tolist()
    beside = np.flatnonzero(program.work >= 0).tolist()
    row = rng.choice(beside)
    rank = int(program.rank[row])
    work = program.work.copy()
    match rng.randrange(4):
        case 0:
            rows.remove(row)
            other = rng.randrange(starts[rank], starts[rank + 1])
            rows.insert(other, row)
        case 1:
            rows.remove(row)
        case 2:
            rows.insert(row, row)
        case 3:
            work[row] = program.work[rng.choice(beside)]
    program = replace(program, work=work)
    columns = {name: getattr(program, name)[rows] for name in ("kind", *EVERY_COLUMN)}
    ranks = program.rank[rows]
    return replace(program, rank_start=np.searchsorted(ranks, np.arange(program.ranks + 1)), **columns)


@pytest.mark.slow
@pytest.mark.sweep
def test_random_programs_and_damaged_ones_are_judged_as_a_walk_by_hand_does() -> None:
    rng = random.Random(13)
    verdicts = Counter[bool]()
    for seed in range(swept(100_000, 60)):
        schedule = random_schedule(seed)
        schedule = with_recomputation(schedule, seed) if seed % 3 == 0 else schedule
        costs = Costs(F=rng.randint(1, 3), I=rng.randint(1, 3), W=rng.randint(1, 3), recomputed=1.0)
        dependencies = Dependencies.of(schedule)
        measured = measure_memory(schedule, costs, dependencies)
        peak = measured.memory_inside.max()
        cap, kept_free = rng.randint(0, int(peak)), rng.randint(0, 2)
        placed = placed_under(dependencies, costs, cap, rng.choice((0.5, 1.0, 3.0)), kept_free)
        placed = placed if seed % 2 else placed.beside(random_replica_works(dependencies, costs, rng))
        program = insert_works(insert_communication(schedule, costs, dependencies), dependencies, placed)
        assert verify_program(program) == []
        sound, memory, host = replayed(program, dict.fromkeys(range(program.stages), 1.0))
        assert sound
        compute = program.kind <= InstructionKind.CELL
        curve = without(measured, placed)
        assert np.array(memory)[compute].tolist() == curve.memory.tolist()
        assert placed.on_host(dependencies).tolist() == most_by_gap(program, host, from_cells=False)
        behind = np.arange(len(dependencies)) + dependencies.rank + 1
        between = np.array(most_by_gap(program, memory, from_cells=True))
        assert placed.most_between(dependencies, measured.memory).tolist() == between[behind].tolist()
        most = [max(memory[low:high], default=0.0) for low, high in pairwise(program.rank_start.tolist())]
        assert np.maximum(curve.peak_memory, most).tolist() == curve.peak_memory.tolist()
        if len(placed):
            wrong = damaged(program, rng)
            sound, _, _ = replayed(wrong, dict.fromkeys(range(program.stages), 1.0))
            codes = {finding.code for finding in verify_program(wrong)}
            verdicts[sound] += 1
            assert codes <= {"S330", "S331", "S319", "S314"}  # S314: a work between the messages of a batch
            if not sound:
                assert codes
    assert verdicts[False] > verdicts[True]


@pytest.mark.parametrize("most", [3, 1 << 20, 1 << 40])
def test_works_are_sorted_as_column_by_column(most: int) -> None:
    """Up to 62 bits in one sort, and wider ones column by column."""
    draw = np.random.default_rng(most)
    columns = [draw.integers(-most, most, 50) for _ in range(3)]
    assert order_of(columns).tolist() == np.lexsort(columns).tolist()
    assert order_of([column[:0] for column in columns]).size == 0


def test_programs_with_works_go_through_every_form() -> None:
    schedule = schedule_of("dualpipev", P=2, M=4)
    dependencies = Dependencies.of(schedule)
    costs = Costs(activation=1.5)
    placed = placed_under(dependencies, costs, 3.0, 1.0, 0)
    plain = insert_communication(schedule, costs, dependencies)
    program = insert_works(plain, dependencies, placed)
    assert len(placed) > 0
    assert insert_works(plain, dependencies, PlacedWorks.none()) is plain
    assert parse_program(print_program(program)) == program
    assert program_from_json(program_to_json(program)) == program
    assert program_from_npz(program_to_npz(program)) == program
    assert "START offload 0A" in print_program(program)
    assert print_program(program).startswith("program 2\n")
    assert print_program(plain).startswith("program 1\n")
    with pytest.raises(DiagnosticError, match="version 2 has works, and version 1 has none") as caught:
        parse_program(print_program(program).replace("program 2", "program 1"))
    assert caught.value.diagnostics[0].position == ("S390", 1, 1)
