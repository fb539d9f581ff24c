"""Searches for the best order: states the problem as a constraint model for CP-SAT of OR-tools."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib import util
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from schedc.ir.arrays import Int64
from schedc.search.bounds import OpWindows
from schedc.search.problem import SearchProblem

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, CpSolverStatus, IntVar


_BEAT = 0.1
"""Seconds between two checks of a running search for Ctrl-C."""


@dataclass(frozen=True)
class Effort:
    """The limits and settings of the solver.

    seconds: wall-clock limit, or None. work: limit in the solver's own measure of work, or None. With ``work`` and
        without ``seconds``, the result depends only on the input, these settings and the version of OR-tools.
    workers: number of strategies that search in parallel. seed: seed of the solver's random numbers.
    """

    seconds: float | None = 30.0
    work: float | None = None
    workers: int = 8
    seed: int = 0

    @property
    def repeatable(self) -> bool:
        """Whether another run gives the same result."""
        return self.seconds is None

    def part(self, share: float) -> Effort:
        """This share of the effort."""
        return replace(
            self,
            seconds=None if self.seconds is None else share * self.seconds,
            work=None if self.work is None else share * self.work,
        )

    def after(self, seconds: float, share: float = 0.0) -> Effort:
        """What is left after these seconds, and after this share of the work."""
        left = self.part(1 - share)
        return left if self.seconds is None else replace(left, seconds=max(0.1, self.seconds - seconds))


@dataclass(frozen=True)
class SolverResult:
    """The result of the solver.

    status: optimal, feasible, infeasible or unknown; missing without OR-tools.
    start: [cells] ticks at which the cells of its best order start; None if it found no order.
    bound: ticks that no order undercuts. seconds: wall-clock time of the search.
    """

    status: str
    start: Int64 | None
    bound: int
    seconds: float


def solve(windows: OpWindows, objective: str, bound: int, hint: Int64 | None, effort: Effort) -> SolverResult:
    """Search for an order with the least objective.

    objective: "makespan" or "span". bound: ticks of a known lower bound.
    hint: [cells] ticks at which the cells of a known order start; the result is never worse. None: no order is known.
    """
    if util.find_spec("ortools") is None:
        return SolverResult("missing", None, bound, 0.0)
    from ortools.sat.python import cp_model

    begin = perf_counter()
    problem, dependencies = windows.problem, windows.problem.dependencies
    horizon = int(problem.duration.sum() + problem.lag.sum())  # the best order ends before it, if any order exists
    if hint is not None and objective == "makespan":
        horizon = int((hint + problem.duration).max())
    model = cp_model.CpModel()
    latest = horizon - windows.tail - problem.duration
    start = [model.new_int_var(low, high, "") for low, high in
             zip(windows.head.tolist(), latest.tolist(), strict=True)]  # fmt: skip
    duration = problem.duration.tolist()
    for before, after, lag in zip(problem.before.tolist(), problem.after.tolist(), problem.lag.tolist(), strict=True):
        model.add(start[after] >= start[before] + (duration[before] + lag))
    cells = [model.new_fixed_size_interval_var(s, d, "") for s, d in zip(start, duration, strict=True)]
    for rank in range(dependencies.rank_start.size - 1):
        model.add_no_overlap(cells[dependencies.rank_start[rank] : dependencies.rank_start[rank + 1]])
    _limit_memory(model, problem, start, horizon)
    _minimize(model, windows, start, objective, bound, horizon)
    if hint is not None:
        for variable, value in zip(start, hint.tolist(), strict=True):
            model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    configure(solver, effort)
    status = solved(solver, model, Event())
    names = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible", cp_model.INFEASIBLE: "infeasible"}
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return SolverResult(
        names.get(status, "unknown"),
        np.array([solver.value(variable) for variable in start], np.int64) if found else None,
        max(bound, int(np.ceil(solver.best_objective_bound - 1e-6))) if found else bound,
        perf_counter() - begin,
    )


def solved(solver: CpSolver, model: CpModel, stop: Event) -> CpSolverStatus:
    """Searches in another thread and returns the status. Ctrl-C then interrupts this thread, which stops the search.

    stop: stops the search when it is set.
    """
    with ThreadPoolExecutor(1) as thread:
        search = thread.submit(solver.solve, model)
        try:
            while not wait([search], _BEAT).done:
                if stop.is_set():
                    solver.stop_search()
        except KeyboardInterrupt:
            while not search.done():  # a call before the search has begun has no effect
                solver.stop_search()
                wait([search], _BEAT)
            raise
        return search.result()


def _limit_memory(model: CpModel, problem: SearchProblem, start: list[IntVar], horizon: int) -> None:
    """Require that the memory in use on each rank is at most its capacity at all times. Every hold is an interval."""
    if problem.capacity is None:
        return
    holds, duration = problem.holds, problem.duration.tolist()
    rank = problem.dependencies.rank[holds.taken]
    for number, capacity in enumerate(problem.capacity.tolist()):
        of_rank = np.flatnonzero(rank == number)
        if int(holds.amount[of_rank].sum()) <= capacity:
            continue
        intervals = []
        for taken, late, freed in zip(
            holds.taken[of_rank].tolist(), holds.late[of_rank].tolist(), holds.freed[of_rank].tolist(), strict=True
        ):
            begin = start[taken] + (duration[taken] if late else 0)
            end = start[freed] + duration[freed]
            size = model.new_int_var(0, horizon, "")
            intervals.append(model.new_interval_var(begin, size, end, ""))
        model.add_cumulative(intervals, holds.amount[of_rank].tolist(), capacity)


def _minimize(
    model: CpModel, windows: OpWindows, start: list[IntVar], objective: str, bound: int, horizon: int
) -> None:
    """Add the objective: the last end, or the longest time from a rank's first start to its last end."""
    problem, value = windows.problem, model.new_int_var(bound, horizon, "")
    duration, dependencies = problem.duration.tolist(), problem.dependencies
    if objective == "makespan":
        for cell in np.flatnonzero(windows.tail == 0).tolist():
            model.add(value >= start[cell] + duration[cell])
        model.minimize(value)
        return
    forced = windows.first if problem.time.exact else None
    for rank in np.unique(dependencies.rank).tolist():
        cells = range(int(dependencies.rank_start[rank]), int(dependencies.rank_start[rank + 1]))
        begin: IntVar | int
        if forced is not None:
            begin = int(windows.head[forced[rank]])
            model.add(start[int(forced[rank])] == begin)
        else:
            begin = model.new_int_var(0, horizon, "")
            for cell in cells:
                model.add(begin <= start[cell])
        for cell in cells:
            model.add(value >= start[cell] + duration[cell] - begin)
    model.minimize(value)


def configure(solver: CpSolver, effort: Effort) -> None:
    """Gives a solver its limits, workers and seed."""
    parameters = solver.parameters
    parameters.catch_sigint_signal = False
    parameters.num_workers = effort.workers
    parameters.random_seed = effort.seed
    if effort.seconds is not None:
        parameters.max_time_in_seconds = effort.seconds
    if effort.work is not None:
        parameters.max_deterministic_time = effort.work
    parameters.interleave_search = effort.repeatable and effort.workers > 1
