"""Closes the gap between a bound and an order: asks about makespans between them, one question per worker at a time."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from importlib import util
from threading import Event
from time import perf_counter
from typing import NamedTuple

from schedc.ir.arrays import Int64
from schedc.search.questions import TickModel, TickQuestion
from schedc.search.rank_windows import RankWindows
from schedc.search.solver import Effort, SolverResult, configure, solved

_LEAST_CELLS = 256
"""Cells from which questions are asked. The solver's own search decides smaller problems sooner."""

_MOST_LITERALS = 150_000
"""Literals up to which questions are asked. Making the model of a larger one takes seconds."""

_WORKERS = 2
"""Most questions at a time: the bound, and a makespan halfway to the order."""

_LEAST = 0.05
"""Share of the effort with which no question is begun."""


class TickAnswer(NamedTuple):
    """An answer. status: optimal for an order, infeasible or unknown. start: [cells] ticks of the order.

    work: in the solver's own measure.
    """

    status: str
    start: Int64 | None
    work: float


@dataclass
class _AskedGap:
    """What is known between questions. bound: ticks that no order undercuts. best: ticks of the best order.

    asked: makespans that were asked about. running: makespans of running questions, and the events that stop them.
    """

    bound: int
    best: int
    start: Int64 | None = None
    work: float = 0.0
    asked: set[int] = field(default_factory=set)
    running: dict[Future[TickAnswer], tuple[int, Event]] = field(default_factory=dict)

    def following(self) -> int | None:
        """The makespan to ask about next: the bound, and then halfway from the largest open question to the best."""
        open_ones = [each for each in self.asked if self.bound <= each < self.best]
        if self.bound not in open_ones:
            return self.bound if self.bound < self.best else None
        middle = (max(open_ones) + self.best) // 2
        return None if middle in open_ones else middle

    def take(self, makespan: int, answer: TickAnswer) -> None:
        """Takes an answer, and stops the questions that it answers too."""
        self.work += answer.work
        if answer.start is not None and makespan < self.best:
            self.best, self.start = makespan, answer.start
        if answer.status == "infeasible":
            self.bound = max(self.bound, makespan + 1)
        for other, stop in self.running.values():
            if not self.bound <= other < self.best:
                stop.set()


def worth_asking(tight: RankWindows, bound: int) -> bool:
    """Whether questions about makespans near this bound are likely to be answered. bound: ticks."""
    if len(tight.windows.problem) < _LEAST_CELLS or util.find_spec("ortools") is None:
        return False
    return TickQuestion(tight, bound).size <= _MOST_LITERALS


def close_gap(tight: RankWindows, bound: int, best: int, effort: Effort) -> SolverResult:
    """Searches for orders shorter than ``best`` ticks, or for a larger bound, in the effort that is given.

    bound, best: ticks. The start of the result is None if no shorter order was found.
    """
    began, standing = perf_counter(), _AskedGap(bound, best)
    _ = tight.head, tight.tail  # found once, before threads ask for them
    workers = 1 if effort.repeatable else min(effort.workers, _WORKERS)
    with ThreadPoolExecutor(workers) as threads:
        try:
            while True:
                while len(standing.running) < workers and (makespan := standing.following()) is not None:
                    limit = _share(effort, perf_counter() - began, standing.work, workers)
                    if limit is None:
                        break
                    standing.asked.add(makespan)
                    stop = Event()
                    question = TickQuestion(tight, makespan)
                    standing.running[threads.submit(ask, question, limit, stop)] = makespan, stop
                if not standing.running:
                    break
                for future in wait(standing.running, return_when=FIRST_COMPLETED).done:
                    makespan, _ = standing.running.pop(future)
                    standing.take(makespan, future.result())
        except KeyboardInterrupt:
            for _, stop in standing.running.values():
                stop.set()
            raise
    proved = standing.bound >= standing.best
    status = "optimal" if proved else "unknown" if standing.start is None else "feasible"
    return SolverResult(status, standing.start, min(standing.bound, standing.best), perf_counter() - began)


def _share(effort: Effort, taken: float, work: float, workers: int) -> Effort | None:
    """What the next question may spend: all that is left where another worker asks too, else half; None for nothing.

    taken: seconds so far. work: of the questions so far.
    """
    spent, limit = (work, effort.work) if effort.seconds is None else (taken, effort.seconds)
    if limit is None:
        return effort
    left = 1 - spent / limit
    return effort.part(left if workers > 1 else left / 2) if left > _LEAST else None


def ask(question: TickQuestion, effort: Effort, stop: Event) -> TickAnswer:
    """The solver's answer to a question, by one worker. stop: ends the search when it is set."""
    from ortools.sat.python import cp_model

    if question.refuted:
        return TickAnswer("infeasible", None, 0.0)
    began, model = perf_counter(), TickModel.of(question)
    if effort.seconds is not None:
        effort = replace(effort, seconds=max(0.1, effort.seconds - (perf_counter() - began)))
    solver = cp_model.CpSolver()
    configure(solver, replace(effort, workers=1))
    solver.parameters.cp_model_presolve = False
    solver.parameters.cp_model_probing_level = solver.parameters.symmetry_level = 0
    solver.parameters.linearization_level = 0
    status = solved(solver, model.model, stop)
    work = solver.response_proto.deterministic_time
    if status == cp_model.INFEASIBLE:
        return TickAnswer("infeasible", None, work)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return TickAnswer("optimal", model.starts(solver), work) if found else TickAnswer("unknown", None, work)
