"""Programs with works: activations of a schedule that leave under a cap, as `offload auto` places them."""

from __future__ import annotations

from random import Random

import numpy as np

from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.insert_works import insert_works
from schedc.step.timeline import durations, run_durations
from schedc.step.works.place_offload import LaneSpeeds, choose_moves, stays_of
from schedc.step.works.place_replica_works import ReplicaBytes, ShardingRoom, place_replica_works


def placed_under(
    dependencies: Dependencies, costs: Costs, cap: float, move: float, kept_free: float = 0.0
) -> PlacedWorks:
    """Works that keep ranks under ``cap``. move: time of a unit of memory. kept_free: memory that stays free."""
    schedule = dependencies.schedule
    of_stage = costs.resolved(schedule.stages)
    start, end = run_durations(dependencies, durations(dependencies, of_stage), of_stage.p2p)
    held = measure_memory(schedule, costs, dependencies).memory_inside.copy()
    stays = stays_of(dependencies, of_stage.activation, of_stage.recomputed)
    most = np.full(schedule.ranks, float(cap))
    speeds = LaneSpeeds(start, end, move, move)
    return choose_moves(dependencies.rank_start, stays, held, most - kept_free, most, speeds).placed(dependencies)


def random_replica_works(dependencies: Dependencies, costs: Costs, draw: Random) -> PlacedWorks:
    """Gathers, drops and sums of random sizes; sharded parameters only where no rank holds a copy of a stage."""
    schedule = dependencies.schedule
    stages, homes = schedule.stages, schedule.placement.rank_of_stage
    summed, experts, sharded = (np.array([draw.choice((0.0, 1.0, 2.5)) for _ in range(stages)]) for _ in range(3))
    sharded *= (homes == homes[0]).all()
    duration = durations(dependencies, costs.resolved(stages))
    sizes = ReplicaBytes(summed, experts, sharded, np.zeros(stages))
    room = None
    if draw.random() < 0.5:
        held = measure_memory(schedule, costs, dependencies).memory_inside
        room = ShardingRoom(held, np.full(schedule.ranks, float(held.max()) * draw.random() * 2))
    return place_replica_works(
        dependencies, sizes, duration=duration, latency=0.0, per_byte=(draw.random(), draw.random()), room=room
    )


def with_random_works(schedule: Schedule, draw: Random) -> Program:
    """The program of a schedule whose activations leave under a random cap, with works among replicas or without."""
    dependencies, costs = Dependencies.of(schedule), Costs(activation=draw.choice((1.0, 1.5, 1e9)))
    placed = placed_under(dependencies, costs, costs.resolved(schedule.stages).activation[0] * draw.randint(0, 3), 1.0)
    if draw.random() < 0.5:
        placed = placed.beside(random_replica_works(dependencies, costs, draw))
    return insert_works(insert_communication(schedule, costs, dependencies), dependencies, placed)
