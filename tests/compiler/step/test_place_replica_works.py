"""Gathers and sums among replicas: their places against all places there are, and whole parameters under a cap."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from schedc.cell.collectives import verify_collectives
from schedc.cell.issue_order import CellOnRank, ExpertRanks, events
from schedc.cell.program import CellProgram
from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.ir.arrays import Floats
from schedc.ir.program import EVERY_COLUMN, InstructionKind
from schedc.ir.verify_program import verify_program
from schedc.ir.works import WorkGroup, WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory, without
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.insert_works import insert_works, placed_in
from schedc.step.timeline import durations
from schedc.step.work_runs import run_with_works
from schedc.step.works.place_replica_works import ReplicaBytes, ShardingRoom, lane_times, place_replica_works

GATHER, DROP, SCATTER, SPREAD = WorkKind.GATHER, WorkKind.DROP, WorkKind.SCATTER, WorkKind.SPREAD


def step(name: str, forward: float = 1.0, **sizes: int) -> tuple[Dependencies, Floats]:
    """The dependencies of a schedule, and [cells] their times."""
    dependencies = Dependencies.of(legal_schedule(open_input(name), sizes))
    return dependencies, durations(dependencies, Costs(F=forward).resolved(dependencies.schedule.stages))


def sharded(stages: int, size: float) -> ReplicaBytes:
    nothing = np.zeros(stages)
    return ReplicaBytes(nothing, nothing, np.linspace(size, 1.5 * size, stages), nothing)


@pytest.mark.parametrize(
    ("name", "forward", "size"),
    [("interleaved_1f1b", 1.0, 0.5), ("interleaved_1f1b", 3.0, 2.3), ("dualpipev", 1.0, 1.7)],
)
def test_gathers_start_as_late_as_the_shortest_step_allows(name: str, forward: float, size: float) -> None:
    """Against every place of the gathers of a rank: no shorter step, no less exposed, and then the latest STARTs."""
    dependencies, duration = step(name, forward, P=2, M=4)
    sizes, speed = sharded(dependencies.schedule.stages, size), (1.0, 1.0)
    placed = place_replica_works(dependencies, sizes, duration=duration, latency=0.0, per_byte=speed)

    def cost(start: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[float, float, int]:
        other = replace(placed, start=start).in_order()
        times = lane_times(other, dependencies, sizes, speed)
        lanes = run_with_works(dependencies, duration, 0.0, other, times)
        gathers = other.works.kind == GATHER
        exposed = float(lanes.exposed[gathers].sum())
        return round(float(lanes.closed.max()), 9), round(exposed, 9), -int(other.start[gathers].sum())

    for rank in range(2):
        rows = np.flatnonzero((placed.works.kind == GATHER) & (placed.rank_of(placed.start, dependencies) == rank))
        first = int(dependencies.rank_start[rank]) + rank
        costs = []
        for gaps in product(*(range(first, int(placed.join[row]) + 1) for row in rows)):
            start = placed.start.copy()
            start[rows] = gaps
            costs.append(cost(start))
        assert cost(placed.start) == min(costs)
        assert len(costs) > 1


def test_first_halves_overlap_and_second_halves_follow_where_the_rank_does_not_wait() -> None:
    dependencies, duration = step("interleaved_1f1b", P=2, M=4)
    each = np.full(4, 1.0)
    sizes, speed = ReplicaBytes(each, 2 * each, 0 * each, 0 * each), (0.5, 0.5)
    placed = place_replica_works(dependencies, sizes, duration=duration, latency=0.0, per_byte=speed)
    lanes = run_with_works(dependencies, duration, 0.0, placed, lane_times(placed, dependencies, sizes, speed))
    rank = placed.rank_of(placed.start, dependencies)
    behind = dependencies.rank_start[rank + 1] + rank
    inside = (placed.works.kind == SCATTER) & (placed.join < behind)
    assert inside.any()
    assert not lanes.exposed[inside].any()
    spreads = placed.of_kinds(SPREAD)
    assert (
        spreads.join
        == dependencies.rank_start[rank + 1][placed.works.kind == SPREAD] + rank[placed.works.kind == SPREAD]
    ).all()
    assert sorted(placed.join[placed.works.kind == SCATTER].tolist()) == sorted(spreads.start.tolist())


@pytest.mark.parametrize(("name", "tied"), [("dualpipe", ()), ("1f1b", (0, 3))])
def test_sums_that_a_reduce_precedes_start_behind_it(name: str, tied: tuple[int, ...]) -> None:
    from schedc.ir.ties import Tie

    schedule = legal_schedule(open_input(name), {"P": 4, "M": 8})
    schedule = replace(schedule, tied=(Tie(tied, 4),)) if tied else schedule
    dependencies = Dependencies.of(schedule)
    duration = durations(dependencies, Costs().resolved(4))
    last = np.isin(np.arange(4), tied).astype(np.float64)
    sizes = ReplicaBytes(np.ones(4), np.zeros(4), np.zeros(4), last)
    placed = place_replica_works(dependencies, sizes, duration=duration, latency=0.0, per_byte=(1.0, 1.0))
    program = insert_works(insert_communication(schedule, Costs(), dependencies), dependencies, placed)
    assert verify_program(program) == []
    assert insert_works(program, dependencies, PlacedWorks.none()) is program
    again = placed_in(program)
    assert (again.works, again.start.tolist(), again.join.tolist()) == (
        placed.works,
        placed.start.tolist(),
        placed.join.tolist(),
    )
    for rank in range(4):
        rows = [row for row in program.instructions(rank) if row.work >= 0 or row.kind is InstructionKind.REDUCE]
        reduced = [index for index, row in enumerate(rows) if row.kind is InstructionKind.REDUCE]
        starts = [index for index, row in enumerate(rows) if row.kind is InstructionKind.START]
        scatters = [index for index in starts if program.works.work(rows[index].work).kind is SCATTER]
        late = [index for index in scatters if reduced and index > max(reduced)]
        assert len(late) == (2 if name == "dualpipe" else int(rank in tied))


def test_replicas_that_start_works_in_another_order_are_refused() -> None:
    """Two works of one communicator in another order (S321), and of two (S322), on one of four replicas."""
    dependencies, duration = step("interleaved_1f1b", P=2, M=4)
    each, group = np.full(4, 1.0), ExpertRanks(1, 2, data=2)
    sizes = ReplicaBytes(each, each, each, 0 * each)
    placed = place_replica_works(dependencies, sizes, duration=duration, latency=0.0, per_byte=(0.5, 0.5))
    program = insert_works(insert_communication(dependencies.schedule, Costs(), dependencies), dependencies, placed)
    idle = CellOnRank(None, None, CellProgram((), -1, -1, "F"))
    assert verify_collectives(program, group, lambda rank, replica, item: idle) == []
    own = {event.collective.communicator for event in events(program, 0, 3, group, lambda *_: idle)}
    assert {name: list(group.members(name)) for name in own} == {"dp": [0, 1, 2, 3], "dp of expert rank 1": [1, 3]}
    assert verify_collectives(program, group, lambda *_: idle, {3: replace(program)}) == []
    works, starts = program.works, np.flatnonzero(program.kind == InstructionKind.START)
    scatters = [row for row in starts.tolist() if works.kind[program.work[row]] == SCATTER]
    gathers = [row for row in starts.tolist() if works.kind[program.work[row]] == GATHER]
    for (one, two), code in (((gathers[0], gathers[1]), "S321"), ((scatters[0], scatters[1]), "S322")):
        order = np.arange(len(program))
        order[[one, two]] = two, one
        other = replace(program, **{name: getattr(program, name)[order] for name in ("kind", *EVERY_COLUMN)})
        findings = verify_collectives(program, group, lambda *_: idle, {3: other})
        assert {finding.code for finding in findings} == {code}


def test_a_bucket_and_the_parameters_that_are_dropped_behind_it_count_together() -> None:
    dependencies, duration = step("1f1b", P=2, M=2)
    sizes = sharded(2, 3.0)
    placed = place_replica_works(dependencies, sizes, duration=duration, latency=0.0, per_byte=(0.1, 0.1))
    after = measure_memory(dependencies.schedule, Costs(), dependencies).memory
    assert placed.peaks_between(dependencies, after).tolist() == [6.0, 9.0]


def test_parameters_are_dropped_between_far_uses_where_the_room_asks_for_it() -> None:
    dependencies, duration = step("interleaved_1f1b", P=2, M=8)
    schedule, sizes = dependencies.schedule, sharded(4, 3.0)
    memory = measure_memory(schedule, Costs(), dependencies)
    gathers = []
    for cap in (99.0, 11.0, 10.0):
        room = ShardingRoom(memory.memory_inside, np.full(2, cap))
        placed = place_replica_works(
            dependencies, sizes, duration=duration, latency=0.0, per_byte=(0.1, 0.1), room=room
        )
        held = without(memory, placed).memory_inside
        gathers.append(int((placed.works.kind == GATHER).sum()))
        assert held.max() <= cap
        program = insert_works(insert_communication(schedule, Costs(), dependencies), dependencies, placed)
        assert verify_program(program) == []
        assert (placed.works.group[placed.works.kind == GATHER] == WorkGroup.REPLICAS).all()
    assert gathers[0] == 4
    assert gathers[0] < gathers[-1]
