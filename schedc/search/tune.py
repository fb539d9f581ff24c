"""Finds a better order of a legal schedule's ops: makes candidates, bounds and searches, and evaluates every result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib import util
from time import perf_counter

import numpy as np

from schedc.diagnostics import CompilerBug, Diagnostic, DiagnosticError, Label, render
from schedc.ir.arrays import Floats, Int64, repeat
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.search.asking import close_gap, worth_asking
from schedc.search.bounds import OpWindows, combinatorial_bound
from schedc.search.floors import RankFloor, rank_floors
from schedc.search.greedy import Order, list_orders, serial_order
from schedc.search.known import known_starts
from schedc.search.problem import Freedom, SearchProblem, problem_of
from schedc.search.rank_windows import RankWindows
from schedc.search.solver import Effort, SolverResult, solve
from schedc.search.split import join_backwards
from schedc.search.varied import ListEffort, ListProblem, search_side_by_side, start_order, worth_compiling
from schedc.source import NOWHERE
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.timeline import Timeline, run_durations, simulate

MAX_OPS = 8_000
"""Most ops of a schedule that is searched. A split backward counts as two. With more ops, the solver needs gigabytes
and exceeds its time limit."""

NO_SOLVER = "the solver's search needs OR-tools: pip install 'schedc[tune]'"

_LEAST_CELLS = 256
"""Cells from which list schedules are made by the thousand before the solver runs."""

_SHARE = 0.8
"""Most of the seconds that list schedules take. They end sooner where many tries give nothing."""

_SHARE_BESIDE = 0.25
"""Most of the seconds that list schedules take where questions follow them."""

_SHARE_OF_QUESTIONS = 0.8
"""Most of what list schedules leave that questions take. The solver's own search has the rest."""

_TRIES_PER_WORK = 100
"""Tries of list schedules for one unit of the solver's work."""

_ROUNDING = 1e-9
"""Relative difference below which two values of an objective, or a peak and its cap, are equal."""


@dataclass(frozen=True, eq=False)
class JudgedSchedule:
    """A schedule, evaluated by the compiler's own timeline and memory analysis.

    peak: [P] peak memory, in the unit of ``costs.activation``. value: the objective, in the time unit of the costs.
    fits: whether no rank exceeds its cap.
    """

    schedule: Schedule
    timeline: Timeline
    peak: Floats
    value: float
    fits: bool


@dataclass(frozen=True, eq=False)
class TuningResult:
    """The best order found, and the proof of how good it is. Times are in the time unit of the costs.

    caps: [P] memory caps, in the unit of ``costs.activation``; None for no cap.
    seed, best: the given schedule and the best one. They are the same if no better order was found.
    origin: origin of the best: "seed", "list" (a list schedule), or "serial" (one microbatch after another). "varied"
        is made of these, "slots" of slot patterns, and "search" by the solver. Else the known order of this name was
        varied, such as the "paired wave".
    bound: lower bound of the objective for all orders within ``problem.limits`` and the cap.
    own_bound: the lower bound that needs no search. floor: the floor that it is; None if another bound is larger.
    search: the result of the solver; None if a search was not needed.
    """

    objective: str
    problem: SearchProblem
    caps: Floats | None
    seed: JudgedSchedule
    best: JudgedSchedule
    origin: str
    own_bound: float
    floor: RankFloor | None
    bound: float
    search: SolverResult | None
    freedom: Freedom
    effort: Effort

    @property
    def untried(self) -> tuple[str, ...]:
        """What could not be tried here, in words, with the remedy."""
        return (NO_SOLVER,) if self.search is not None and self.search.status == "missing" else ()

    @property
    def gap(self) -> float:
        """Most by which the result can exceed the best possible value, relative to the bound."""
        return self.best.value / self.bound - 1 if self.bound else 0.0

    @property
    def proven(self) -> bool:
        """Whether the result is proved to be the best possible."""
        return self.best.value <= self.bound * (1 + _ROUNDING)


def tune(
    seed: Schedule,
    costs: Costs,
    *,
    caps: Floats | None = None,
    objective: str = "makespan",
    freedom: Freedom | None = None,
    effort: Effort | None = None,
    known: Iterable[tuple[str, Schedule]] = (),
    progress: Callable[[float, float], None] = lambda best, bound: None,
) -> TuningResult:
    """The best order of a legal schedule's ops that is found within ``effort``.

    caps: [P] memory that each rank may hold, in the unit of ``costs.activation``; None for no cap.
    objective: "makespan", or "span": the longest time from a rank's first start to its last end.
    known: names and orders of other schedules, from which list schedules start. They are opened where they are needed,
        and left out if their placement is another.
    progress: takes the best makespan and the bound, whenever list schedules find a better order.
    freedom: what may differ from the seed besides the order. Default: nothing.

    The result is legal and within the cap. It is never worse than a seed within the cap. Raises `DiagnosticError`:
    S407 if no order within the cap exists or is found, S408 for too many ops, S409 for a schedule with Rs.
    """
    effort, freedom = effort or Effort(), freedom or Freedom()
    refuse_unsearched(seed, freedom)
    problem = problem_of(seed, costs, caps, freedom)
    windows = OpWindows(problem)
    simple = serial_order(windows)
    if len(simple) < len(problem):
        raise _nothing_fits(seed, problem, caps, "")
    judge = Judge(costs, caps, objective)
    judged = judge(seed)
    candidates = [Candidate("seed", _seed_order(problem), judged)] if judged.fits else []
    candidates += _without_search(windows, judge, simple)
    least = judge(with_cell_order(problem, simple)).peak
    if not candidates and problem.independent:
        raise _nothing_fits(seed, problem, caps, _needs(problem, least, "the least"))
    ticks, floor = bound_without_search(windows, objective)
    own_bound = _cost(problem, objective, ticks)
    told = partial(_tell, problem, own_bound, progress)
    best, search = _search(windows, judge, candidates, known, ticks, effort, told)
    if best is None:
        raise _nothing_fits(seed, problem, caps, _needs(problem, least, "enough for one order"), search)
    result = best.judged if best.origin == "seed" or not freedom.split else _joined(judge, seed, best.judged)
    bound = min(own_bound if search is None else _cost(problem, objective, search.bound), result.value)
    # joined backwards may be shorter than the split ones of the problem, which the floor speaks of
    floor, own_bound = None if own_bound > bound * (1 + _ROUNDING) else floor, min(own_bound, bound)
    return TuningResult(objective, problem, caps, judged, result, best.origin, own_bound, floor, bound, search, freedom,
                        effort)  # fmt: skip


def _open(best: Candidate | None, bound: float) -> bool:
    """Whether a better order than the best so far is not excluded."""
    return best is None or best.judged.value > bound * (1 + _ROUNDING)


def bound_without_search(windows: OpWindows, objective: str) -> tuple[int, RankFloor | None]:
    """Ticks that no order undercuts, as known without a search, and the floor that they are if one is the largest."""
    ticks = combinatorial_bound(windows, objective)
    known = rank_floors(windows) if objective == "makespan" else []
    best = max(known, key=lambda floor: floor.makespan, default=None)
    return (ticks, None) if best is None or best.makespan < ticks else (best.makespan, best)


def with_cell_order(problem: SearchProblem, order: Order) -> Schedule:
    """The schedule whose ranks run their cells in this order. Its ops have no place in a text."""
    dependencies, schedule = problem.dependencies, problem.schedule
    cells = np.array(order, np.int64)
    cells = cells[np.argsort(dependencies.rank[cells], kind="stable")]
    rows = np.stack([dependencies.first[cells], dependencies.second[cells]], axis=1)
    number = np.cumsum(dependencies.pairs[cells]) - 1
    pair = repeat(np.where(dependencies.pairs[cells], number, -1), 1 + dependencies.pairs[cells])
    taken = rows[rows >= 0]
    columns = {name: getattr(schedule, name)[taken] for name in ("kind", "stage", "microbatch")}
    nothing = np.zeros(len(schedule), np.int32)
    return replace(schedule, **columns, pair=pair.astype(np.int32), phase=nothing, span=nothing,
                   phases=("tuned",), spans=(NOWHERE,), source=None)  # fmt: skip


def start_times(problem: SearchProblem, order: Order) -> Int64:
    """[cells] ticks at which the cells start if ranks run them in this order, each as early as possible."""
    cells = np.array(order, np.int64)[np.argsort(problem.dependencies.rank[order], kind="stable")]
    ordered, start = Dependencies.of(with_cell_order(problem, order)), np.empty(len(problem), np.int64)
    start[cells] = run_durations(ordered, problem.duration[cells].astype(float), float(problem.lag.max(initial=0)))[0]
    return start


@dataclass(frozen=True)
class Judge:
    """Evaluates schedules by the compiler's own analyses, and checks that they are legal, whoever made them.

    caps: [P] memory of each rank; None for no cap.
    """

    costs: Costs
    caps: Floats | None
    objective: str

    def __call__(self, schedule: Schedule) -> JudgedSchedule:
        if findings := check_schedule(schedule):
            raise CompilerBug("search", "an order that is not legal", "\n".join(map(render, findings)))
        dependencies = Dependencies.of(schedule)
        timeline = simulate(schedule, self.costs, dependencies)
        peak = measure_memory(schedule, self.costs, dependencies).peak_memory
        value = timeline.makespan if self.objective == "makespan" else float(timeline.span.max(initial=0))
        fits = self.caps is None or bool((peak <= self.caps * (1 + _ROUNDING)).all())
        return JudgedSchedule(schedule, timeline, peak, value, fits)


@dataclass(frozen=True, eq=False)
class Candidate:
    """An order of the cells of a problem, its origin as in `TuningResult`, and its evaluation."""

    origin: str
    order: Order
    judged: JudgedSchedule


def _without_search(windows: OpWindows, judge: Judge, simple: Order) -> Iterator[Candidate]:
    """The list schedules and the serial order, as far as they keep within the cap. simple: the serial order."""
    problem = windows.problem
    position = np.empty(len(problem), np.int64)
    position[_seed_order(problem)] = np.arange(len(problem))
    orders = [*(("list", order) for order in list_orders(windows, position.tolist())), ("serial", simple)]
    for origin, order in orders:
        judged = judge(with_cell_order(problem, order))
        if judged.fits:
            yield Candidate(origin, order, judged)


def _shorter(first: Candidate, second: Candidate) -> Candidate:
    """The second candidate if it is shorter by more than rounding, else the first."""
    return second if second.judged.value < first.judged.value * (1 - _ROUNDING) else first


def _worth_lists(problem: SearchProblem) -> bool:
    """Whether list schedules are made by the thousand. The solver decides small problems sooner."""
    return len(problem) >= _LEAST_CELLS or util.find_spec("ortools") is None


def _search(
    windows: OpWindows,
    judge: Judge,
    candidates: Sequence[Candidate],
    known: Iterable[tuple[str, Schedule]],
    ticks: int,
    effort: Effort,
    progress: Callable[[int], None],
) -> tuple[Candidate | None, SolverResult | None]:
    """The best order, by list schedules and then by the solver, and what the solver said; None where it did not run.

    ticks: the bound that needs no search.
    """
    problem, objective = windows.problem, judge.objective
    bound, best = _cost(problem, objective, ticks), reduce(_shorter, candidates) if candidates else None
    asked, tight = None, RankWindows(windows)
    asks = _open(best, bound) and objective == "makespan" and worth_asking(tight, ticks)
    if _open(best, bound) and objective == "makespan" and _worth_lists(problem):
        starts = [*(("varied", start_times(problem, each.order)) for each in candidates), *known_starts(problem, known)]
        best, effort = _by_lists(judge, best, starts, problem, ticks, effort, asks, progress)
    if asks and best is not None and _open(best, bound):
        best, asked, effort = _by_questions(tight, judge, best, ticks, effort)
    least = ticks if asked is None else asked.bound
    if not _open(best, _cost(problem, objective, least)):
        return best, asked
    hint = None if best is None else start_times(problem, best.order)
    search = solve(windows, objective, least, hint, effort)
    return _better(problem, judge, best, search), search


def _by_questions(
    tight: RankWindows, judge: Judge, best: Candidate, bound: int, effort: Effort
) -> tuple[Candidate | None, SolverResult, Effort]:
    """The best order after questions about shorter orders, the result of the questions, and the effort left.

    bound: ticks.
    """
    problem = tight.windows.problem
    makespan = int((start_times(problem, best.order) + problem.duration).max())
    result = close_gap(tight, bound, makespan, effort.part(_SHARE_OF_QUESTIONS))
    return _better(problem, judge, best, result), result, effort.after(result.seconds, _SHARE_OF_QUESTIONS)


def _tell(problem: SearchProblem, bound: float, progress: Callable[[float, float], None], makespan: int) -> None:
    """Passes a makespan in ticks on in the unit of the costs, with the bound."""
    progress(problem.cost(makespan), bound)


def _by_lists(
    judge: Judge,
    best: Candidate | None,
    starts: Sequence[tuple[str, Int64]],
    problem: SearchProblem,
    bound: int,
    effort: Effort,
    asks: bool,
    progress: Callable[[int], None],
) -> tuple[Candidate | None, Effort]:
    """The best so far, or the order that list schedules find if it is shorter; and the effort that they leave.

    starts: names and [cells] priorities of known orders. bound: ticks. asks: whether questions follow.
    """
    seconds = None if effort.seconds is None else effort.seconds * (_SHARE_BESIDE if asks else _SHARE)
    tries = None if effort.work is None else round(effort.work * _TRIES_PER_WORK)
    limits = ListEffort(seconds, tries, bound, effort.seed, effort.workers)
    lists, began = ListProblem(problem, worth_compiling(len(problem), limits)), perf_counter()
    found = search_side_by_side(lists, starts, limits, progress)
    taken = perf_counter() - began
    rest = effort.after(taken)
    if found is None:
        return best, rest
    order = start_order(found.start)
    candidate = Candidate(found.origin, order, judge(with_cell_order(problem, order)))
    if not candidate.judged.fits:
        return best, rest
    return candidate if best is None else _shorter(best, candidate), rest


def _better(problem: SearchProblem, judge: Judge, best: Candidate | None, result: SolverResult) -> Candidate | None:
    """The solver's order if it is within the cap and better than the best so far, else the best so far."""
    if result.start is None:
        return best
    order = np.argsort(result.start, kind="stable").tolist()
    candidate = Candidate("search", order, judge(with_cell_order(problem, order)))
    if not candidate.judged.fits:
        return best
    return candidate if best is None else _shorter(best, candidate)


def _joined(judge: Judge, seed: Schedule, best: JudgedSchedule) -> JudgedSchedule:
    """The best schedule, with full backwards where splitting them gains nothing."""

    def as_good(schedule: Schedule) -> bool:
        judged = judge(schedule)
        return judged.fits and judged.value <= best.value * (1 + _ROUNDING)

    return judge(join_backwards(best.schedule, seed, as_good))


def refuse_recomputation(seed: Schedule) -> None:
    """Raise `DiagnosticError` (S409) for a schedule with Rs."""
    recomputations = np.flatnonzero(seed.kind == OpKind.R)
    if recomputations.size:
        label = Label(seed.spans[seed.span[recomputations[0]]])
        help = "tune the order without its Rs, and let `recompute ... in bubbles` of a plan place them"
        message = "an order with recomputations is not searched"
        raise DiagnosticError([Diagnostic("S409", message, label, help=help, source=seed.source)])


def refuse_unsearched(seed: Schedule, freedom: Freedom) -> None:
    refuse_recomputation(seed)
    ops = len(seed) + (int((seed.kind == OpKind.B).sum()) if freedom.split else 0)
    if ops > MAX_OPS:
        message = f"{ops:,} ops are too many to search their order; at most {MAX_OPS:,} are possible"
        raise DiagnosticError([Diagnostic("S408", message, help="use smaller sizes", source=seed.source)])


def _seed_order(problem: SearchProblem) -> Order:
    order: Order = problem.dependencies.levels.order.tolist()
    return order


def _cost(problem: SearchProblem, objective: str, ticks: int) -> float:
    """A bound in ticks as one in the unit of the costs. A span is rounded at both of its ends."""
    return max(0.0, problem.cost(ticks, slack=int(objective == "span" and not problem.time.exact)))


def _needs(problem: SearchProblem, peak: Floats, what: str) -> str:
    return f"{what}: {problem.cap_unit.numbers(peak)} on ranks 0 to {peak.size - 1}"


def _nothing_fits(
    seed: Schedule, problem: SearchProblem, caps: Floats | None, needs: str, result: SolverResult | None = None
) -> DiagnosticError:
    """The finding S407: no order within the cap. needs: the memory that would suffice, as far as it is known."""
    if caps is None:
        raise CompilerBug("search", "no order without a cap")
    shown = problem.cap_unit.numbers(caps[:1] if (caps == caps[0]).all() else caps)
    status = "infeasible" if result is None else result.status
    said = {"infeasible": "exists", "missing": "was found without the solver"}.get(status, "was found in this time")
    message = f"no order within a memory of {shown} ({problem.cap_unit}) {said}"
    notes = tuple(f"only orders with this in common were searched: {text}" for text in problem.limits)
    help = "; ".join(["raise --memory", *filter(None, [needs, NO_SOLVER if status == "missing" else ""])])
    return DiagnosticError([Diagnostic("S407", message, notes=notes, help=help, source=seed.source)])
