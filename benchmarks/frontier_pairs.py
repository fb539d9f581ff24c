"""Measures orders whose pairs are made: the word `pairs` of `benchmarks/frontier.py`.

Rows: `tune --pairs make` on waves of 8 ranks with 2, 4 and 8 stages each, in 9 microbatches of memory. Costs are those
of a mixture of experts: F = I = 1.5, with 1 of compute and 0.5 of exposed exchanges, W = 1, and 2 for a pair. `waste`
is the makespan less 3 for each microbatch, in microbatches of a rank. A row has failed above its most, with a floor
other than the formula's, or if `schedc check` prices the found order otherwise.

Floors: random small problems, whose best order with any pairs CP-SAT finds in a model of its own: single ops and
all possible pairs as optional intervals. A floor above it has failed.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np
from frontier_commands import searched_order
from ortools.sat.python import cp_model

from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.ir.ops import OpKind
from schedc.search.bounds import OpWindows
from schedc.search.floors import rank_floors
from schedc.search.greedy import serial_order
from schedc.search.problem import Freedom, SearchProblem, problem_of
from schedc.search.tune import with_cell_order
from schedc.step.costs.costs import Costs
from schedc.step.durations import alone, duration
from schedc.step.memory import measure_memory

RANKS = 8
COSTS = "--cost F=1.5 --cost I=1.5 --cost W=1 --cost FB=3"
MOST = {2: 14.0, 4: 11.5, 8: 9.75}
"""By stages per rank, the most waste."""
SEEDS: tuple[tuple[str, dict[str, tuple[int, ...]]], ...] = (
    ("gpipe", {"P": (2, 3), "M": (2, 3, 4)}),
    ("zbh1", {"P": (2, 3), "M": (2, 3, 4)}),
    ("zbv", {"P": (2,), "M": (2, 3)}),
    ("looped_bfs", {"P": (2,), "M": (2,), "v": (2,)}),
    ("dualpipe", {"P": (2,), "M": (4,)}),
)


def measured_pairs(seconds: float, cases: int, first: int) -> dict[str, Any]:
    """The figures of `pairs`. seconds: of each search. cases, first: random problems, and the number of the first."""
    rows = [_row(v, microbatches, seconds) for v in MOST for microbatches in (16, 32)]
    known = [pair_case(number) for number in range(first, first + cases)]
    decided = [case for case in known if case.best is not None]
    above = [case for case in decided if case.best is not None and case.floor > case.best]
    return {
        "cases": len(rows) + len(known),
        "failed": sum(row["failed"] for row in rows) + len(above),
        "rows": rows,
        "undecided": len(known) - len(decided),
        "on_floor": sum(case.floor == case.best for case in decided),
        "with_pairs": sum(case.pairs > 0 for case in decided),
        "examples": [str(case) for case in above[:5]],
    }


def _row(v: int, microbatches: int, seconds: float) -> dict[str, Any]:
    arguments = f"zb_wave -D P={RANKS} -D M={microbatches} -D w={v // 2} --memory 9 --pairs make {COSTS}"
    facts, checked = searched_order(arguments, seconds, 0)
    waste, floor = (facts[key] / v - 3 * microbatches for key in ("makespan", "lower_bound"))
    formula = RANKS + 1.5 * (RANKS - 1) / v
    failed = waste > MOST[v] + 1e-9 or abs(floor - formula) > 1e-9 or abs(checked - facts["makespan"]) > 1e-6
    return {"command": f"schedc tune {arguments}", "waste": waste, "most": MOST[v], "floor": floor,
            "formula": formula, "origin": facts["origin"], "failed": failed}  # fmt: skip


class PairCase(NamedTuple):
    """A problem whose best order with any pairs is known. Times in ticks. pairs: of that order."""

    name: str
    sizes: dict[str, int]
    costs: Costs
    caps: tuple[float, ...]
    floor: int
    best: int | None
    pairs: int


def pair_case(number: int) -> PairCase:
    """The problem of this number, and its best order."""
    draw = Random(number)
    name, ranges = SEEDS[draw.randrange(len(SEEDS))]
    sizes = {size: draw.choice(values) for size, values in ranges.items()}
    seed = legal_schedule(open_input(name), sizes)
    alike = draw.random() < 0.5

    def of_stages(values: tuple[float, ...]) -> tuple[float, ...]:
        return (draw.choice(values),) * seed.stages if alike else tuple(draw.choice(values) for _ in range(seed.stages))

    costs = Costs(F=of_stages((2, 3, 4)), I=of_stages((2, 3, 4)), W=of_stages((1, 2)), FB=of_stages((4, 5, 6)),
                  p2p=draw.choice((0, 0, 1)), activation=of_stages((1, 1, 2)))  # fmt: skip
    freedom = Freedom(split=draw.random() < 0.5, make_pairs=True)
    problem = problem_of(seed, costs, None, freedom)
    least = measure_memory(with_cell_order(problem, serial_order(OpWindows(problem))), costs).peak_memory
    peak = measure_memory(seed, costs).peak_memory
    caps = np.maximum(least, np.floor(least + draw.choice((0.0, 0.5, 1.0, 1.2)) * (peak - least)))
    problem = problem_of(seed, costs, caps, freedom)
    floor = max(each.makespan for each in rank_floors(OpWindows(problem)))
    best, pairs = best_with_pairs(problem, costs)
    return PairCase(name, sizes, costs, tuple(caps.tolist()), floor, best, pairs)


def best_with_pairs(problem: SearchProblem, costs: Costs) -> tuple[int | None, int]:
    """The least makespan in ticks of any order with any pairs, None if it is not proved, and its pairs."""
    model, schedule = cp_model.CpModel(), problem.schedule
    horizon = 2 * int(problem.duration.sum() + problem.lag.sum())
    start, end = ([model.new_int_var(0, horizon, "") for _ in range(len(problem))] for _ in range(2))
    op, lone_times = problem.dependencies.first, alone(costs.resolved(schedule.stages))
    alone_ticks = problem.time.down(lone_times[schedule.kind[op], schedule.stage[op]]).tolist()
    joined: list[list[cp_model.IntVar]] = [[] for _ in range(len(problem))]
    for rank, (low, high) in enumerate(pairwise(problem.dependencies.rank_start.tolist())):
        intervals = _pairs_of_rank(model, problem, costs, range(low, high), start, end, joined, op)
        for cell in range(low, high):
            lone = model.new_bool_var("")
            model.add(sum(joined[cell]) + lone == 1)
            intervals.append(model.new_optional_interval_var(start[cell], alone_ticks[cell], end[cell], lone, ""))
        model.add_no_overlap(intervals)
        _limit(model, problem, rank, start, end, horizon)
    for before, after, lag in zip(problem.before.tolist(), problem.after.tolist(), problem.lag.tolist(), strict=True):
        model.add(start[after] >= end[before] + lag)
    makespan = model.new_int_var(0, horizon, "")
    model.add_max_equality(makespan, end)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, 5.0
    if solver.solve(model) != cp_model.OPTIMAL:
        return None, 0
    forwards = [cell for cell in range(len(problem)) if schedule.kind[op[cell]] == OpKind.F]
    return int(solver.value(makespan)), sum(solver.value(each) for cell in forwards for each in joined[cell])


def _pairs_of_rank(
    model: cp_model.CpModel,
    problem: SearchProblem,
    costs: Costs,
    cells: range,
    start: list[cp_model.IntVar],
    end: list[cp_model.IntVar],
    joined: list[list[cp_model.IntVar]],
    op: np.ndarray,
) -> list[cp_model.IntervalVar]:
    """The optional intervals of all pairs of a forward and a backward among the cells of a rank."""
    schedule, stage_costs = problem.schedule, costs.resolved(problem.schedule.stages)
    intervals = []
    for first in cells:
        for second in cells:
            kinds = OpKind(int(schedule.kind[op[first]])), OpKind(int(schedule.kind[op[second]]))
            if kinds[0] != OpKind.F or kinds[1] not in (OpKind.B, OpKind.I):
                continue
            stages = [np.array([schedule.stage[op[cell]]]) for cell in (first, second)]
            size = int(problem.time.down(duration(stage_costs, *kinds, stages))[0])
            both = model.new_bool_var("")
            intervals.append(model.new_optional_interval_var(start[first], size, end[first], both, ""))
            model.add(start[second] == start[first]).only_enforce_if(both)
            model.add(end[second] == end[first]).only_enforce_if(both)
            joined[first].append(both)
            joined[second].append(both)
    return intervals


def _limit(
    model: cp_model.CpModel,
    problem: SearchProblem,
    rank: int,
    start: list[cp_model.IntVar],
    end: list[cp_model.IntVar],
    horizon: int,
) -> None:
    """The memory of a rank at all times."""
    holds, capacity = problem.holds, problem.capacity
    own = np.flatnonzero(problem.dependencies.rank[holds.taken] == rank)
    if capacity is None or not own.size:
        return
    intervals = []
    for hold in own.tolist():
        taken, freed = int(holds.taken[hold]), int(holds.freed[hold])
        begin = end[taken] if holds.late[hold] else start[taken]
        intervals.append(model.new_interval_var(begin, model.new_int_var(0, horizon, ""), end[freed], ""))
    model.add_cumulative(intervals, holds.amount[own].tolist(), int(capacity[rank]))
