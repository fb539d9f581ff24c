"""The search itself: the problem as a constraint model for OR-tools' CP-SAT, which is loaded only here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from schedc.search.bounds import Windows
from schedc.search.problem import SearchProblem
from schedc.search.ticks import Int64

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, CpSolverStatus, IntVar


_BEAT = 0.1
"""Seconds between two looks at a search."""


@dataclass(frozen=True)
class Effort:
    """How long and how the solver searches.

    seconds: wall-clock limit, or None. work: limit in the solver's own measure of work, or None; with it, and without
    ``seconds``, the result depends on nothing but the input, these settings and the version of OR-tools.
    workers: strategies that search side by side. seed: of the solver's random numbers.
    """

    seconds: float | None = 30.0
    work: float | None = None
    workers: int = 8
    seed: int = 0

    @property
    def repeatable(self) -> bool:
        return self.seconds is None


@dataclass(frozen=True)
class SolverResult:
    """What the solver says. start: [cells] ticks of its best order, None if it has none; bound: ticks that no order
    undercuts; status: optimal, feasible, infeasible or unknown; seconds: that it took."""

    status: str
    start: Int64 | None
    bound: int
    seconds: float


def solve(
    problem: SearchProblem, windows: Windows, objective: str, bound: int, hint: Int64 | None, effort: Effort
) -> SolverResult:
    """Search for an order whose objective is least.

    hint: [cells] starts of a known order, which the result is never worse than; None where none is known.
    bound: ticks that are known to be a lower bound.
    """
    from ortools.sat.python import cp_model

    began = perf_counter()
    known = problem.dependencies
    horizon = _horizon(problem)
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
    for rank in range(known.rank_start.size - 1):
        model.add_no_overlap(cells[known.rank_start[rank] : known.rank_start[rank + 1]])
    _limit_memory(model, problem, start, horizon)
    _minimize(model, problem, windows, start, objective, bound, horizon)
    if hint is not None:
        for variable, value in zip(start, hint.tolist(), strict=True):
            model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    _configure(solver, effort)
    status = _interruptible(solver, model)
    names = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible", cp_model.INFEASIBLE: "infeasible"}
    has = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return SolverResult(
        names.get(status, "unknown"),
        np.array([solver.value(variable) for variable in start], np.int64) if has else None,
        max(bound, int(np.ceil(solver.best_objective_bound - 1e-6))) if has else bound,
        perf_counter() - began,
    )


def _interruptible(solver: CpSolver, model: CpModel) -> CpSolverStatus:
    """The status of a search in another thread: in this one, Python hears of Ctrl-C only between its own steps."""
    with ThreadPoolExecutor(1) as thread:
        search = thread.submit(solver.solve, model)
        try:
            while not wait([search], _BEAT).done:
                pass
        except KeyboardInterrupt:
            while not search.done():  # the first call comes to nothing where the search has not begun
                solver.stop_search()
                wait([search], _BEAT)
            raise
        return search.result()


def _horizon(problem: SearchProblem) -> int:
    """Ticks in which some order ends whatever it is, if any exists."""
    return int(problem.duration.sum() + problem.lag.sum())


def _limit_memory(model: CpModel, problem: SearchProblem, start: list[IntVar], horizon: int) -> None:
    """On each rank, what is held at one time is at most its capacity: every hold is an interval of its own."""
    if problem.capacity is None:
        return
    holds, duration = problem.holds, problem.duration.tolist()
    rank = problem.dependencies.rank[holds.taken]
    for number, capacity in enumerate(problem.capacity.tolist()):
        mine = np.flatnonzero(rank == number)
        if int(holds.amount[mine].sum()) <= capacity:
            continue
        intervals = []
        for taken, late, given in zip(
            holds.taken[mine].tolist(), holds.late[mine].tolist(), holds.given[mine].tolist(), strict=True
        ):
            begin = start[taken] + (duration[taken] if late else 0)
            end = start[given] + duration[given]
            size = model.new_int_var(0, horizon, "")
            intervals.append(model.new_interval_var(begin, size, end, ""))
        model.add_cumulative(intervals, holds.amount[mine].tolist(), capacity)


def _minimize(
    model: CpModel,
    problem: SearchProblem,
    windows: Windows,
    start: list[IntVar],
    objective: str,
    bound: int,
    horizon: int,
) -> None:
    """The objective: the last end, or the longest time from a rank's first start to its last end."""
    value = model.new_int_var(bound, horizon, "")
    duration, known = problem.duration.tolist(), problem.dependencies
    if objective == "makespan":
        for cell in np.flatnonzero(windows.tail == 0).tolist():
            model.add(value >= start[cell] + duration[cell])
        model.minimize(value)
        return
    forced = windows.first if problem.time.exact else None
    for rank in np.unique(known.rank).tolist():
        mine = range(int(known.rank_start[rank]), int(known.rank_start[rank + 1]))
        begin: IntVar | int
        if forced is not None:
            begin = int(windows.head[forced[rank]])
            model.add(start[int(forced[rank])] == begin)
        else:
            begin = model.new_int_var(0, horizon, "")
            for cell in mine:
                model.add(begin <= start[cell])
        for cell in mine:
            model.add(value >= start[cell] + duration[cell] - begin)
    model.minimize(value)


def _configure(solver: CpSolver, effort: Effort) -> None:
    parameters = solver.parameters
    parameters.catch_sigint_signal = False
    parameters.num_workers = effort.workers
    parameters.random_seed = effort.seed
    if effort.seconds is not None:
        parameters.max_time_in_seconds = effort.seconds
    if effort.work is not None:
        parameters.max_deterministic_time = effort.work
    parameters.interleave_search = effort.repeatable and effort.workers > 1
