"""From a legal schedule to a better order of its ops: seeds, bound, search, and the judgement of what was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.legality import check_schedule
from schedc.analysis.memory import measure_memory
from schedc.analysis.timeline import Timeline, simulate
from schedc.cost.costs import Costs
from schedc.diagnostics import CompilerBug, Diagnostic, DiagnosticError, Label, render
from schedc.ir.arrays import repeat
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.search.bounds import Arcs, Windows, combinatorial_bound
from schedc.search.greedy import Order, list_orders, serial_order
from schedc.search.problem import Freedom, SearchProblem, problem_of
from schedc.search.solver import Effort, SolverResult, solve
from schedc.search.split import join_backwards
from schedc.search.ticks import Floats, Int64
from schedc.source import NOWHERE

MAX_OPS = 8_000
"""Ops of the largest schedule that is searched, split backwards counted as two: with more, the solver needs gigabytes
and does not keep to its time."""

_ROUNDING = 1e-9
"""Relative difference below which two values of an objective, or a peak and its cap, are one."""


@dataclass(frozen=True, eq=False)
class JudgedSchedule:
    """A schedule and what our own timeline and memory say of it.

    value: of the objective. peak: [P] memory in the unit of ``costs.activation``. fits: whether within the cap.
    """

    schedule: Schedule
    timeline: Timeline
    peak: Floats
    value: float
    fits: bool


@dataclass(frozen=True, eq=False)
class TuningResult:
    """The best order known at the end.

    seed, best: judged by the compiler's own analyses; best is the seed where nothing better was found.
    origin: where the best comes from: "seed", "list" (a list schedule), "serial" (one microbatch after another) or
        "search" (the solver).
    bound: no order within ``problem.limits`` and the cap has a lower objective. own_bound: the part of it that needs
        no search.
    search: what the solver says, None where nothing was left for it to do.
    """

    objective: str
    problem: SearchProblem
    caps: Floats | None
    seed: JudgedSchedule
    best: JudgedSchedule
    origin: str
    own_bound: float
    bound: float
    search: SolverResult | None
    freedom: Freedom
    effort: Effort

    @property
    def gap(self) -> float:
        """By how much of the bound the result may be away from the best."""
        return self.best.value / self.bound - 1 if self.bound else 0.0

    @property
    def proven(self) -> bool:
        return self.best.value <= self.bound * (1 + _ROUNDING)


def tune(
    seed: Schedule,
    costs: Costs,
    *,
    caps: Floats | None = None,
    objective: str = "makespan",
    freedom: Freedom | None = None,
    effort: Effort | None = None,
) -> TuningResult:
    """The best order of a legal schedule's ops that is found within ``effort``.

    caps: [P] the most that each rank may hold, in the unit of ``costs.activation``; None for no cap.
    objective: "makespan", or "span": the longest time from a rank's first start to its last end.
    freedom: what else than the order may differ; default: nothing.

    The result is legal, within the cap, and never worse than the seed if that is within the cap. Raises
    `DiagnosticError`: S407 if no order within the cap exists or is known at the end, S408 for too many ops, S409 for an
    order with Rs.
    """
    effort, freedom = effort or Effort(), freedom or Freedom()
    _refuse_recomputation(seed)
    _refuse_too_many(seed, freedom)
    problem = problem_of(seed, costs, caps, freedom)
    arcs = Arcs.of(problem)
    simple = serial_order(problem, arcs)
    if len(simple) < len(problem):
        raise _nothing_fits(seed, problem, caps, "")
    windows, judge = Windows(problem, arcs), _Judge(costs, caps, objective)
    judged = judge(seed)
    known = [Candidate("seed", _seed_order(problem), judged)] if judged.fits else []
    known += _made(problem, windows, judge, simple)
    least = judge(with_cell_order(problem, simple)).peak
    if not known and problem.independent:
        raise _nothing_fits(seed, problem, caps, _needs(least, "the least"))
    best = reduce(_shorter, known) if known else None
    own = combinatorial_bound(problem, windows, objective)
    own_bound, found = _cost(problem, objective, own), None
    if best is None or best.judged.value > own_bound * (1 + _ROUNDING):
        hint = None if best is None else start_times(problem, arcs, best.order)
        found = solve(problem, windows, objective, own, hint, effort)
        best = _better(problem, judge, best, found)
    if best is None:
        raise _nothing_fits(seed, problem, caps, _needs(least, "enough for one order"), found)
    result = best.judged if best.origin == "seed" or not freedom.split else _joined(judge, seed, best.judged)
    bound = min(own_bound if found is None else _cost(problem, objective, found.bound), result.value)
    own_bound = min(own_bound, bound)
    return TuningResult(objective, problem, caps, judged, result, best.origin, own_bound, bound, found, freedom, effort)


def with_cell_order(problem: SearchProblem, order: Order) -> Schedule:
    """The schedule whose ranks run their cells in this order. Its ops point at no text: no text wrote the order."""
    known, schedule = problem.dependencies, problem.schedule
    cells = np.array(order, np.int64)
    cells = cells[np.argsort(known.rank[cells], kind="stable")]
    rows = np.stack([known.first[cells], known.second[cells]], axis=1)
    number = np.cumsum(known.pairs[cells]) - 1
    pair = repeat(np.where(known.pairs[cells], number, -1), 1 + known.pairs[cells])
    taken = rows[rows >= 0]
    columns = {name: getattr(schedule, name)[taken] for name in ("kind", "stage", "microbatch")}
    nothing = np.zeros(len(schedule), np.int32)
    return replace(schedule, **columns, pair=pair.astype(np.int32), phase=nothing, span=nothing,
                   phases=("tuned",), spans=(NOWHERE,), source=None)  # fmt: skip


def start_times(problem: SearchProblem, arcs: Arcs, order: Order) -> Int64:
    """[cells] ticks at which the cells start if ranks run them in this order, each as soon as it can."""
    duration, rank = problem.duration.tolist(), problem.dependencies.rank.tolist()
    free = [0] * problem.schedule.ranks
    start = [0] * len(problem)
    for cell in order:
        arrived = max((start[b] + duration[b] + lag for b, lag in arcs.followed[cell]), default=0)
        start[cell] = max(free[rank[cell]], arrived)
        free[rank[cell]] = start[cell] + duration[cell]
    return np.array(start, np.int64)


@dataclass(frozen=True)
class _Judge:
    """Judges schedules by the compiler's own analyses; trusts nobody."""

    costs: Costs
    caps: Floats | None
    objective: str

    def __call__(self, schedule: Schedule) -> JudgedSchedule:
        if findings := check_schedule(schedule):
            raise CompilerBug("search", "an order that is not legal", "\n".join(map(render, findings)))
        known = Dependencies.of(schedule)
        timeline = simulate(schedule, self.costs, known)
        peak = measure_memory(schedule, self.costs, known).peak_memory
        value = timeline.makespan if self.objective == "makespan" else float(timeline.span.max(initial=0))
        fits = self.caps is None or bool((peak <= self.caps * (1 + _ROUNDING)).all())
        return JudgedSchedule(schedule, timeline, peak, value, fits)


@dataclass(frozen=True, eq=False)
class Candidate:
    """An order of the cells of a problem, where it comes from, and its judgement."""

    origin: str
    order: Order
    judged: JudgedSchedule


def _made(problem: SearchProblem, windows: Windows, judge: _Judge, simple: Order) -> Iterator[Candidate]:
    """Orders that need no search and keep within the cap."""
    position = np.empty(len(problem), np.int64)
    position[_seed_order(problem)] = np.arange(len(problem))
    made = [*(("list", order) for order in list_orders(problem, windows, position.tolist())), ("serial", simple)]
    for origin, order in made:
        judged = judge(with_cell_order(problem, order))
        if judged.fits:
            yield Candidate(origin, order, judged)


def _shorter(first: Candidate, second: Candidate) -> Candidate:
    """The second only where more than rounding speaks for it."""
    return second if second.judged.value < first.judged.value * (1 - _ROUNDING) else first


def _better(problem: SearchProblem, judge: _Judge, best: Candidate | None, found: SolverResult) -> Candidate | None:
    """The solver's order if it is within the cap and better than the best so far, else that."""
    if found.start is None:
        return best
    order = np.argsort(found.start, kind="stable").tolist()
    found_one = Candidate("search", order, judge(with_cell_order(problem, order)))
    if not found_one.judged.fits:
        return best
    return found_one if best is None else _shorter(best, found_one)


def _joined(judge: _Judge, seed: Schedule, best: JudgedSchedule) -> JudgedSchedule:
    """The best with full backwards where splitting them gains nothing."""

    def as_good(schedule: Schedule) -> bool:
        judged = judge(schedule)
        return judged.fits and judged.value <= best.value * (1 + _ROUNDING)

    return judge(join_backwards(best.schedule, seed, as_good))


def _refuse_recomputation(seed: Schedule) -> None:
    again = np.flatnonzero(seed.kind == OpKind.R)
    if again.size:
        label = Label(seed.spans[seed.span[again[0]]])
        help = "tune the order without its Rs, and let `recompute ... in bubbles` of a plan place them"
        message = "an order with recomputations is not searched"
        raise DiagnosticError([Diagnostic("S409", message, label, help=help, source=seed.source)])


def _refuse_too_many(seed: Schedule, freedom: Freedom) -> None:
    ops = len(seed) + (int((seed.kind == OpKind.B).sum()) if freedom.split else 0)
    if ops > MAX_OPS:
        message = f"{ops:,} ops are too many to search their order; at most {MAX_OPS:,} are possible"
        raise DiagnosticError([Diagnostic("S408", message, help="use smaller sizes", source=seed.source)])


def _seed_order(problem: SearchProblem) -> Order:
    order: Order = problem.dependencies.levels.order.tolist()
    return order


def _cost(problem: SearchProblem, objective: str, ticks: int) -> float:
    """A bound in ticks as one in the unit of the costs. A span rounds at both of its ends."""
    return max(0.0, problem.cost(ticks, slack=int(objective == "span" and not problem.time.exact)))


def _needs(peak: Floats, what: str) -> str:
    return f"{what}: {', '.join(f'{value:g}' for value in peak)} on ranks 0 to {peak.size - 1}"


def _nothing_fits(
    seed: Schedule, problem: SearchProblem, caps: Floats | None, needs: str, found: SolverResult | None = None
) -> DiagnosticError:
    """S407, with what is known of the memory that would do."""
    if caps is None:
        raise CompilerBug("search", "no order without a cap")
    shown = f"{caps[0]:g}" if (caps == caps[0]).all() else ", ".join(f"{cap:g}" for cap in caps)
    proven = found is None or found.status == "infeasible"
    message = f"no order within memory {shown} {'exists' if proven else 'was found in this time'}"
    notes = tuple(f"searched were only orders with this in common: {text}" for text in problem.limits)
    help = f"raise --memory; {needs}" if needs else "raise --memory"
    return DiagnosticError([Diagnostic("S407", message, notes=notes, help=help, source=seed.source)])
