"""Finds the best plans of a space best first: no plan is simulated or priced before one whose bound is smaller."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import count, islice
from math import inf

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, RequestError
from schedc.ir.arrays import Floats, Int64
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.search.answer import Answer, Front, pareto_front
from schedc.planner.search.bound import BoundedBlock, PlanBounds, splits_of
from schedc.planner.search.candidates import gather
from schedc.planner.search.result import (
    FoundPlan,
    PolicyCounts,
    SearchCertificate,
    SearchCounts,
    SearchResult,
    SearchSeconds,
    SpaceCounts,
)
from schedc.planner.search.simulated import Orders, simulate_plans
from schedc.planner.search.standing import OpenPlans, Pace, SearchProgress, SearchStanding, seconds_left
from schedc.planner.space.nothing_legal import refuse_nothing_legal
from schedc.planner.space.schedules import LeftOut
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem

_AT_ONCE = 65_536
"""Candidates among which the next one is sought at once."""

_FIRST, _LARGEST = 64, 512
"""Plans of the first batch of simulations, and of a later one: batches double."""


@dataclass(frozen=True)
class SearchOptions:
    """What is asked for. top: plans of the answer. objective: `step`, `memory` or `pareto`.

    The answer has the ``top`` fastest plans of a front (`pareto`), and `SearchResult.pareto` has all.
    exhaustive: simulate and price every plan, whatever its bound. seconds: CPU seconds after which the search stops;
    None for no limit. policy_seconds: as many more for plans that are ordered by their own costs. inside: whether pairs
    are priced from inside. Without it their floors are taken for their steps, and no plan has files. first: plans of
    the first batch of simulations.
    """

    top: int = 10
    objective: str = "step"
    exhaustive: bool = False
    seconds: float | None = None
    policy_seconds: float = 50.0
    inside: bool = True
    first: int = _FIRST


@dataclass(eq=False)
class _Clock:
    """CPU seconds by stage. pace: of the plans of a stage."""

    by_stage: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    pace: defaultdict[str, Pace] = field(default_factory=lambda: defaultdict(Pace))
    cpu: float = field(default_factory=lambda: time.process_time())
    wall: float = field(default_factory=lambda: time.perf_counter())

    @contextmanager
    def of(self, stage: str, plans: int = 0) -> Iterator[None]:
        """Counts the block for a stage. plans: that it finishes."""
        start = time.process_time()
        try:
            yield
        finally:
            seconds = time.process_time() - start
            self.by_stage[stage] += seconds
            self.pace[stage].add(plans, seconds)

    @property
    def used(self) -> float:
        return time.process_time() - self.cpu

    def seconds(self) -> SearchSeconds:
        return SearchSeconds(self.used, time.perf_counter() - self.wall, dict(self.by_stage))


def search(
    space: PlanSpace,
    problem: PlanProblem,
    options: SearchOptions = SearchOptions(),
    progress: SearchProgress | None = None,
) -> SearchResult:
    """The best plans of a space, with what is proven of the others.

    Raises `RequestError`: S712 where no plan is
    legal, S714 where none fits into the device.
    """
    return _BestFirst(space, problem, options, progress or (lambda *_: None)).run()


class _BestFirst:
    """One run of a search."""

    def __init__(
        self, space: PlanSpace, problem: PlanProblem, options: SearchOptions, progress: SearchProgress
    ) -> None:
        self.space, self.problem, self.options, self.progress = space, problem, options, progress
        self.clock, self.counts = _Clock(), SearchCounts()
        self.orders = Orders(space.choice)
        self.exact: list[FoundPlan] = []
        self.so_far, self.ordered, self.inexact = self._empty(), 0, 0
        self.waiting: list[tuple[tuple[float, float], int, FoundPlan]] = []
        self.number = count()
        self.next, self.width = 0, options.first

    def run(self) -> SearchResult:
        with self.clock.of("space"):
            refuse_nothing_legal(self.space)
            splits = splits_of(self.space)
        with self.clock.of("table"):
            self.table = PartTable.of(self.problem, splits)
        with self.clock.of("bound"):
            bounds = PlanBounds(self.space, self.problem, self.table)
            self.usable = bounds.usable
            self.candidates = gather(self._told(bounds), self.options.objective == "memory")
            self.counts = replace(self.counts, bounded=self.candidates.legal)
        answer, complete = self._best()
        if not complete:
            for plan in self.exact:
                answer.add(plan)
        answer, policies = self._with_policies(answer)
        if not answer and complete and not policies.left:
            raise self._nothing_fits()
        return self._result(answer, complete, policies)

    def _told(self, bounds: PlanBounds) -> Iterator[BoundedBlock]:
        seen = 0
        for block in bounds.blocks():
            seen += len(block.block)
            self.progress("bounded", seen)
            yield block

    # The queue: candidates by bound, and in front of it plans that were simulated or priced.

    def _best(self) -> tuple[Answer, bool]:
        """The best plans, and whether nothing open is better than the last of them."""
        answer = self._empty()
        while not self._out_of_time():
            opened = self._next_bound(answer)
            head = self.waiting[0][0] if self.waiting else (inf, inf)
            least = min(head[0], opened)
            if answer.full and not self.options.exhaustive and not answer.takes(least, least):
                return answer, True
            if opened < head[0] or (self.options.exhaustive and opened < inf):
                self._simulate(answer)
            elif self.waiting:
                self._take(answer)
            else:
                return answer, True
        return answer, False

    def _empty(self) -> Answer:
        if self.options.objective == "pareto":
            return Front()
        return Answer(self.options.top, self.options.objective == "memory")

    def _dominates(self, answer: Answer) -> bool:
        """Whether plans are left out that hold as much as a faster one."""
        return isinstance(answer, Front) and not self.options.exhaustive

    def _out_of_time(self) -> bool:
        return self.options.seconds is not None and self.clock.used > self.options.seconds

    def _next_bound(self, answer: Answer) -> float:
        """The least bound of all plans not looked at yet, without plans that a front dominates.

        Plans of a front are taken in ascending order, so that all of them are as fast as what is open.
        """
        if self._dominates(answer):
            smallest = answer.smallest
            while self.next < len(self.candidates):
                smaller = self.candidates.memory[self.next : self.next + _AT_ONCE] < smallest
                if smaller.any():
                    self.next += int(smaller.argmax())
                    break
                self.next += smaller.size
        return inf if self.next >= len(self.candidates) else float(self._bounds[self.next])

    @property
    def _bounds(self) -> Floats:
        return self.candidates.memory if self.options.objective == "memory" else self.candidates.step

    def _simulate(self, answer: Answer) -> None:
        """Looks at the next candidates: more of them each time."""
        places = range(self.next, min(self.next + self.width, len(self.candidates)))
        self.next, self.width = places.stop, min(2 * self.width, _LARGEST)
        most = answer.smallest if self._dominates(answer) else inf
        open = [place for place in places if self.candidates.memory[place] < most]
        fixed = [
            (self._planned(place), float(self.candidates.step[place]))
            for place in open
            if not self.candidates.policy[place]
        ]
        with self.clock.of("simulated", len(fixed)):
            simulated = simulate_plans(fixed, self.orders, self.usable)
        self.counts = replace(self.counts, simulated=self.counts.simulated + len(fixed), orders=len(self.orders.made))
        for plan in simulated:
            self.inexact += not plan.exact
            self._wait(plan)
        self.progress("simulated", self.counts.simulated, self._standing)

    def _planned(self, place: int) -> PlannedStep:
        axes = self.candidates.axes(place)
        return PlannedStep(self.problem, axes, self.space.choice(axes.schedule), self.table)

    def _wait(self, plan: FoundPlan) -> None:
        """Puts a plan into the queue; an exact one is also kept for the front."""
        if plan.exact:
            self._keep(plan)
        value = (plan.peak_bytes, plan.step_s) if self.options.objective == "memory" else (plan.step_s, plan.peak_bytes)
        heapq.heappush(self.waiting, (value, next(self.number), plan))

    def _keep(self, plan: FoundPlan) -> None:
        """Keeps an exact plan for the front, and for where the search stands."""
        self.exact.append(plan)
        self.so_far.add(plan)

    def _take(self, answer: Answer) -> None:
        """Takes the best plan that waits: into the answer if its step is exact, else to a price."""
        _, _, best = heapq.heappop(self.waiting)
        if best.exact:
            answer.add(best)
        elif self._dominates(answer) and not answer.takes(best.step_s, best.peak_bytes):
            return
        elif not self.options.inside:
            self._wait(replace(best, exact=True, floor_s=best.step_s))
        elif (priced := self._priced(best.planned)) is not None and priced.fits:
            self._wait(_with_price(priced, best.floor_s))

    def _priced(self, planned: PlannedStep, stage: str = "priced") -> PricedPlan | None:
        """The price of a plan; None where the compiler refuses its order, which is noted."""
        with self.clock.of(stage, plans=1):
            try:
                priced = price_plan(planned)
            except DiagnosticError as error:
                self.orders.refused[planned.axes.schedule] = error.diagnostics[0].message
                return None
        self.counts = replace(self.counts, priced=self.counts.priced + 1)
        self.progress("priced", self.counts.priced, self._standing)
        return priced

    # Schedules that are ordered by the costs.

    def _with_policies(self, answer: Answer) -> tuple[Answer, PolicyCounts]:
        """The answer with plans whose order follows the costs: ordered and priced by bound, while there is time."""
        places = self._open_policies(answer, np.flatnonzero(self.candidates.policy))
        for place in places:
            spent = self.clock.by_stage["ordered"] >= self.options.policy_seconds
            if spent or self._out_of_time() or not self._open_policies(answer, [place]):
                break
            self.ordered += 1
            floor = float(self.candidates.step[place])
            if (priced := self._priced(self._planned(int(place)), "ordered")) is None or not priced.fits:
                continue
            plan = _with_price(priced, floor)
            self._keep(plan)
            answer.add(plan)
        unordered = self._open_policies(answer, places[self.ordered :])
        least = min((float(self.candidates.step[place]) for place in unordered), default=None)
        return answer, PolicyCounts(self.ordered, len(unordered), least)

    def _open_policies(self, answer: Answer, places: Sequence[int] | Int64) -> list[int]:
        """The places with bounds that the answer would take."""
        if not isinstance(answer, Front):
            limit = answer.last if answer.full else inf
            return [int(place) for place in places if self._bounds[place] < limit]
        step, memory = self.candidates.step, self.candidates.memory
        return [int(place) for place in places if answer.takes(float(step[place]), float(memory[place]))]

    # Where it stands.

    def _standing(self) -> SearchStanding:
        """How many plans cannot enter the answer any more, and how long the others take."""
        if isinstance(self.so_far, Front):
            return SearchStanding(None, None, min((plan.step_s for plan in self.exact), default=None))
        limited = self.so_far.full and not self.options.exhaustive
        limit = self.so_far.last if limited else inf
        below, end = (int(np.searchsorted(self._bounds, limit, side=side)) for side in ("left", "right"))
        policies = np.flatnonzero(self.candidates.policy[:below])[self.ordered :]  # those at the limit are not ordered
        fixed = self.next + np.flatnonzero(~self.candidates.policy[self.next : end])
        waiting = [value[0] for value, _, plan in self.waiting if value[0] <= limit and not plan.exact]
        best = min((plan.step_s for plan in self.exact), default=None)
        share = 1 - (fixed.size + len(waiting) + policies.size) / len(self.candidates)
        if not limited:
            return SearchStanding(share, None, best)
        # Final values are no smaller than these, so that the last plan of the answer is no better than this one.
        values = [*self.so_far.values, *waiting, *self._bounds[fixed], *self._bounds[policies]]
        last = float(np.partition(values, self.options.top - 1)[self.options.top - 1])
        certain, ordered = (int(np.count_nonzero(self._bounds[each] < last)) for each in (fixed, policies))
        priced = sum(value < last for value in waiting)
        pairs = round(fixed.size * self.inexact / max(1, self.counts.simulated))
        plain = sum(plan.priced is None for plan in self.so_far.plans()) * self.options.inside
        files = min(self.options.top, plain + fixed.size)
        open = OpenPlans((certain, fixed.size), (priced, len(waiting) + pairs), (ordered, policies.size), files)
        left = seconds_left(
            open, self.clock.pace, max(0.0, self.options.policy_seconds - self.clock.by_stage["ordered"])
        )
        if left is not None and self.options.seconds is not None:
            left = left.within(max(0.0, self.options.seconds - self.clock.used))
        seconds = self.clock.seconds()
        return SearchStanding(share, left and left.times(max(1.0, seconds.wall / seconds.cpu)), best)

    # The answer.

    def _result(self, answer: Answer, complete: bool, policies: PolicyCounts) -> SearchResult:
        plans = tuple(self._with_files(plan) for plan in islice(answer.plans(), self.options.top))
        open_step = inf if complete else min(self._open_steps(), default=inf)
        if self.options.objective == "memory":  # plans that hold more may be faster than all of the answer
            open_step = float(self.candidates.step[~self.candidates.policy].min(initial=inf))
        least = inf if policies.bound_s is None else policies.bound_s
        certificate = SearchCertificate(
            complete and not policies.left,
            min([open_step, least, *(plan.step_s for plan in plans[:1])]),
            plans[-1].step_s if plans else None,
            not complete,
            policies,
        )
        refused = (LeftOut(name, reason) for name, reason in self.orders.refused.items())
        left_out = (*self.space.offered.left_out, *refused)
        space = SpaceCounts(self.space.raw, self.candidates.legal, len(self.candidates), left_out)
        front = pareto_front(self.exact)
        return SearchResult(space, self.counts, self.clock.seconds(), certificate, plans, front, self.candidates)

    def _open_steps(self) -> Iterator[float]:
        steps = self.candidates.step[self.next :][~self.candidates.policy[self.next :]]
        yield float(steps.min(initial=inf))
        for _, _, plan in self.waiting:
            yield plan.step_s

    def _with_files(self, plan: FoundPlan) -> FoundPlan:
        """The plan, priced if plans of this search have files."""
        return replace(plan, priced=plan.priced or (self._priced(plan.planned) if self.options.inside else None))

    def _nothing_fits(self) -> RequestError:
        """S714 with the plan that holds least, as far as the search knows."""
        least = self.candidates.least
        assert least is not None
        bytes, axes = least
        message = f"no plan of {self.problem.model.name} fits into {self.usable / 1e9:.1f} GB of a device"
        words = ", ".join(f"{each.name} {getattr(axes, each.name)}" for each in fields(axes))
        notes = (f"the plan of least memory holds {bytes / 1e9:.1f} GB at least: {words}",)
        help = "take more devices, a cluster with more memory, or `--space wide`"
        return RequestError([Diagnostic("S714", message, notes=notes, help=help)])


def _with_price(priced: PricedPlan, floor: float) -> FoundPlan:
    """A plan with its price. floor: seconds that bounded it."""
    return FoundPlan(priced.planned, priced.step, priced.needed, priced.digest, floor, priced=priced)
