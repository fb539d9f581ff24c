"""No plan is slower where anything is faster: random plans, with one figure of the machine or one constant raised.

slower        the step is longer with one speed raised. Orders that follow costs are kept as they are: the same plan.
no price      the planner raises an error
negative bars bars of the waterfall of a plan below 0, or a waterfall that does not add up to the step
layout        the layout depends on the figure
bound         a bound of the search above its floor, or its floor above the price
scale         all times doubled and the step not doubled, to 1e-12
devices       at equal constants: a step of an H100 above that of an A100, of an H200 or a B200 above that of an H100
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import KnownOrder
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import order_of, pipeline_of, price_plan
from schedc.planner.price.stage_columns import PlansOfOrder, StageColumns
from schedc.planner.price.waterfall import waterfall
from schedc.planner.search.cell_floors import CellFloors
from schedc.planner.times.constants import CONSTANTS, ConstantVectors
from schedc.planner.times.problem import Stack, TrainingRun
from schedc.planner.times.table import RunTable
from schedc.step.batch import simulate_batch
from truth.cases import Options, Verdict
from truth.draws import bound_of, plan_draws
from truth.shares import in_shares
from truth.speeds import Variant, doubled, faster_clusters, faster_constants, on_devices

_CASES, _SHARE = 20_000, 200
"""Draws of the word, and of one share of them."""
_EACH = 20
"""Raised speeds of one plan."""
_ROUNDING, _EXACT = 1e-11, 1e-12


class Finding(NamedTuple):
    """Something that is wrong with a plan. worst: by what share, or seconds of a bar."""

    what: str
    figure: str
    worst: float
    plan: str


class _Share(NamedTuple):
    """What a share found. drawn, moved: by figure, how often it was raised, and how often the step was shorter then."""

    findings: list[Finding]
    checked: Counter[str]
    drawn: Counter[str]
    moved: Counter[str]


def monotone(options: Options) -> Verdict:
    """The word `monotone`."""
    shares = in_shares(share_of, options, _CASES, _SHARE)
    findings = [finding for share in shares for finding in share.findings]
    checked, drawn, moved = (sum((share[field] for share in shares), Counter()) for field in (1, 2, 3))
    worst: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for finding in findings:
        own = worst[finding.what]
        own[finding.figure] = max(own.get(finding.figure, 0.0), finding.worst)
    figures = {
        "checked": dict(checked),
        "failed": dict(Counter(finding.what for finding in findings)),
        "worst": dict(worst),
        "raised": dict(sorted(drawn.items())),
        "shorter": dict(sorted(moved.items())),
        "findings": [finding._asdict() for finding in findings[:40]],
    }
    names = tuple(f"{finding.what} {finding.figure}: {finding.plan}" for finding in findings)
    return Verdict(checked["slower"], names, figures)


def share_of(seed: str, draws: int) -> _Share:
    """The comparisons of so many raised speeds, a few on each plan. Each plan has a seed of its own."""
    share = _Share([], Counter(), Counter(), Counter())
    for number in range(-(-draws // _EACH)):
        checks = _PlanChecks(f"{seed}.{number}", share)
        try:
            checks.run()
        except Exception as error:  # a draw without a price is a finding, too
            checks.found("no price", f"{type(error).__name__}: {error}"[:200], 1.0)
    return share


class _PlanChecks:
    """The comparisons of the plan of a seed."""

    def __init__(self, seed: str, share: _Share) -> None:
        self.seed, self.share, self.rng = seed, share, random.Random(seed)
        self.draw = next(plan_draws(self.rng))
        self.planned = self.draw.planned

    def run(self) -> None:
        self.order = order_of(self.planned)
        price = price_plan(self.planned)
        self._speeds(price.step)
        bars = waterfall(price)
        least = min(bars, key=lambda bar: bar.seconds)
        self._check("negative bars", least.what, -least.seconds / price.step, _EXACT)
        total = sum(bar.seconds for bar in bars)
        self._check("sum of bars", "step", abs(total / price.step - 1), _ROUNDING)
        bound, floor = bound_of(self.draw), self._floor(price.step)
        self._check("bound", "bound over floor", bound / floor - 1.0, _ROUNDING)
        self._check("bound", "floor over price", floor / price.step - 1.0, _ROUNDING)

    def _check(self, what: str, figure: str, off: float, most: float) -> None:
        self.share.checked[what] += 1
        if not off <= most:
            self.found(what, figure, off)

    def found(self, what: str, figure: str, off: float) -> None:
        """Adds a finding on the plan."""
        problem = self.planned.problem
        own = {name: value for name, value in vars(problem.stack).items() if value != getattr(Stack(), name)}
        plan = f"{self.seed}: {problem.model.name} {problem.cluster.name} {own} {self.planned.axes}"
        self.share.findings.append(Finding(what, figure, off, plan))

    def _speeds(self, step: float) -> None:
        """Raises some figures of the machine and some constants, each by itself; doubles all times; takes presets."""
        problem = self.planned.problem
        raised = self.rng.sample([*faster_clusters(problem, self.rng), *faster_constants(problem, self.rng)], _EACH)
        pairs = [*on_devices(problem)]
        machines = [each for pair in pairs for each in pair]
        steps = steps_of(self.planned, self.order, [*raised, doubled(problem), *machines])
        for each, shorter in zip(raised, steps, strict=False):
            other = replace(problem, cluster=each.cluster, constants=each.constants)
            moved = replace(self.planned, problem=other).layout != self.planned.layout
            self._check("layout", each.figure, float(moved), 0.0)
            self.share.drawn[each.figure] += 1
            self.share.moved[each.figure] += shorter < step * (1 - _ROUNDING)
            self._check("slower", each.figure, shorter / step - 1.0, _ROUNDING)
        self._check("scale", "twice", abs(steps[_EACH] / step / 2.0 - 1.0), _EXACT)
        for number, (faster, slower) in enumerate(pairs):
            first, second = steps[_EACH + 1 + 2 * number :][:2]
            self._check("devices", f"{faster.figure} {slower.figure}", first / second - 1, _ROUNDING)

    def _floor(self, step: float) -> float:
        """Seconds that the search says no order inside of cells undercuts; without pairs those of the price."""
        if not self.planned.axes.overlap or self.planned.problem.stack.free_steps:
            return step
        floors = CellFloors().of([self.planned], self.order.dependencies)
        return float(StageColumns.of_plans([self.planned]).steps(floors[:, None])[0, 0])


def steps_of(planned: PlannedStep, order: KnownOrder, variants: Sequence[Variant]) -> list[float]:
    """[variants] seconds of a plan's step on other machines, under other constants, in its own order and layout.

    One table has all machines as runs, and all constants as vectors.
    """
    machines = list(dict.fromkeys(id(each.cluster) for each in variants))
    cluster = {id(each.cluster): each.cluster for each in variants}
    vectors = list(dict.fromkeys(id(each.constants) for each in variants))
    constants = {id(each.constants): each.constants for each in variants}
    problems = [replace(planned.problem, cluster=cluster[machine]) for machine in machines]
    names = [constant.name for constant in CONSTANTS]
    values = [[constants[each].get(constant.name, constant.median) for constant in CONSTANTS] for each in vectors]
    runs = RunTable([TrainingRun(problem, planned.axes) for problem in problems])
    table = PartTable.of_runs(runs, ConstantVectors.of(names, np.array(values)))
    own = replace(planned, table=table, placed=planned.layout)
    plans = [replace(own, problem=run.problem, number=number) for number, run in enumerate(runs.each)]
    columns = StageColumns(PlansOfOrder(plans), table)
    places = [(machines.index(id(each.cluster)), vectors.index(id(each.constants))) for each in variants]
    steps = columns.steps(_pipelines(columns, order, places))
    return [float(steps[place]) for place in places]


def _pipelines(columns: StageColumns, order: KnownOrder, places: Sequence[tuple[int, int]]) -> Floats:
    """[n, K] seconds of pipelines; with pairs only at places."""
    plans = columns.of.plans
    free = plans[0].problem.stack.free_steps
    if plans[0].axes.overlap:
        seconds = np.ones(columns.rows.shape)
        for number, vector in places:
            line = pipeline_of(plans[number], order, vector)
            seconds[number, vector] = line.span.max() if free else line.makespan
        return seconds
    outcomes = simulate_batch(order.dependencies, columns.batch())
    seconds = outcomes.span.max(axis=0) if free else outcomes.makespan
    return np.asarray(seconds.reshape(columns.rows.shape))
