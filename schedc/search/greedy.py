"""Makes orders without search: list schedules within the cap, and one microbatch after another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedc.ir.arrays import bincount
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind
from schedc.search.bounds import OpWindows
from schedc.search.problem import SearchProblem, stage_key
from schedc.step.choose import ByPriority, Ops, choose

Order = list[int]
"""[cells] all cells of a problem, each after those that it depends on. The cells of a rank run in this order."""


def serial_order(windows: OpWindows) -> Order:
    """One microbatch after another, as far as the arcs allow, with each weight gradient as early as possible.

    If microbatches do not depend on each other (no pairs, one sequence), no order needs less memory on any rank.
    The reason: a microbatch runs its forwards through all chunks of a rank before its first backward there.
    """
    schedule, first = windows.problem.schedule, windows.problem.dependencies.first
    second = np.maximum(windows.problem.dependencies.second, first)
    microbatch = np.minimum(schedule.microbatch[first], schedule.microbatch[second])
    forward = schedule.kind[second] == OpKind.F
    weight = schedule.kind[first] == OpKind.W
    return windows.sorted(list(zip(microbatch.tolist(), forward.tolist(), (~weight).tolist(), strict=True)))


def list_orders(windows: OpWindows, position: list[int]) -> Iterator[Order]:
    """List schedules under different priorities, with promises of memory and without. Deadlocks are left out.

    position: [cells] position in the seed, or in another order, which some of the priorities follow.
    """
    problem = windows.problem
    kind, dependencies = problem.schedule.kind, problem.dependencies
    weight = (kind[dependencies.first] == OpKind.W).tolist()
    forward = (kind[np.maximum(dependencies.second, dependencies.first)] == OpKind.F).tolist()
    longest_tail = (-windows.tail).tolist()
    priorities: tuple[list[tuple[int, ...]], ...] = (
        list(zip(weight, longest_tail, strict=True)),
        list(zip(weight, forward, longest_tail, strict=True)),
        list(zip(position, strict=True)),
        list(zip(weight, position, strict=True)),
    )
    takes, gives = memory_changes_of(problem)
    room = None if problem.capacity is None else problem.capacity.tolist()
    queues = (stage_key(problem.schedule) * 3 + TURN[kind])[dependencies.first].tolist()
    duration, following = problem.duration.tolist(), windows.following
    waits = list(map(len, windows.followed))
    ops = Ops(dependencies.rank_start.tolist(), lambda cell: duration[cell[0]], following, waits)
    none = [0] * len(problem)
    for priority in priorities:
        for promises in (none,) if room is None else (_promises(problem, takes), none):
            order = choose(ops, ByPriority(priority, queues, takes, gives, promises, room)).rows
            if order.size == len(problem):
                yield order.tolist()


def memory_changes_of(problem: SearchProblem) -> tuple[list[int], list[int]]:
    """[cells] memory taken at the start of a cell; [cells] memory freed at its end, less that of a pending weight."""
    takes, gives = np.zeros(len(problem), np.int64), np.zeros(len(problem), np.int64)
    holds = problem.holds
    np.add.at(takes, holds.taken[~holds.late], holds.amount[~holds.late])
    np.add.at(gives, holds.taken[holds.late], -holds.amount[holds.late])
    np.add.at(gives, holds.freed, holds.amount)
    return takes.tolist(), gives.tolist()


def _promises(problem: SearchProblem, takes: list[int]) -> list[int]:
    """[cells] by how much a cell changes the memory that its rank reserves for the microbatches that have begun.

    A microbatch's first forward on a rank reserves room for all that its other chunks there will hold, so that what has
    begun can end. Each later forward uses a part. Pending weights larger than activations are not counted.
    """
    schedule, dependencies = problem.schedule, problem.dependencies
    cells = np.flatnonzero(np.array(takes) > 0)
    row = dependencies.first[cells]
    key = schedule.rank[row].astype(np.int64) * schedule.microbatches + schedule.microbatch[row]
    order = np.lexsort((schedule.stage[row], key))
    cells, key = cells[order], key[order]
    first = np.append(True, key[1:] != key[:-1]) if key.size else np.zeros(0, bool)
    promises = np.zeros(len(problem), np.int64)
    promises[cells] = -np.array(takes)[cells]
    promises[cells[first]] += bincount(np.cumsum(first) - 1, np.array(takes)[cells]).astype(np.int64)
    return promises.tolist()
