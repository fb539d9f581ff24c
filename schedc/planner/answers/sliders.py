"""Moves one constant or figure at a time, prices plans at its values, and finds where two of them take equally long.

         step                          A slider has the steps of all plans at some values. The first plan and
plan 2    \\.                           another one tie where their steps cross. A crossing between two values
plan 1  ___\\._______                   is narrowed by further prices.
           tie  now   value
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.answers.settings import USABLE, Setting
from schedc.planner.price.priced import PricedPlan, order_of, plan_seconds
from schedc.planner.times.constants import NAMES, ConstantVectors

EQUAL = 1e-9
"""Steps that differ by less, relatively, are equal."""
_ROUNDS = 40
"""Prices that narrow a crossing, at most."""


@dataclass(frozen=True, eq=False)
class EqualSteps:
    """The value nearest to a setting's own, on one side, at which another plan overtakes the first one or falls behind.

    plan: its number. step_s: seconds of its step there. They are those of the first plan too, but where that one stops
    to fit, or where values are whole numbers.
    """

    setting: Setting
    plan: int
    value: float
    step_s: float

    @property
    def far(self) -> float:
        """How far the value is from the setting's own, by `Setting.far`."""
        return self.setting.far(self.value)


@dataclass(frozen=True, eq=False)
class Slider:
    """A setting with the steps of plans at its values.

    steps: [values, plans] seconds; infinite where a plan does not fit. matters: whether any plan has several steps.
    ties: nearest first.
    """

    setting: Setting
    steps: Floats
    matters: bool
    ties: tuple[EqualSteps, ...]


def sliders_of(plans: Sequence[PricedPlan], settings: Sequence[Setting]) -> tuple[Slider, ...]:
    """A slider for each setting, with the ties of the first plan with each other one.

    plans: all of one problem; the best plan is first. Orders and layouts stay. No other plan of the space is priced.
    """
    prices = _Prices(plans)
    ends = prices.steps([(setting, value) for setting in settings for value in (setting.values[0], setting.values[-1])])
    moved = [
        setting
        for setting, low, high in zip(settings, ends[::2], ends[1::2], strict=True)
        if setting.name == USABLE or (np.abs(high - low) > EQUAL * low).any()
    ]
    rows = iter(prices.steps([(setting, value) for setting in moved for value in setting.values]))
    steps = {setting.name: np.array([next(rows) for _ in setting.values]) for setting in moved}
    ties = [
        *_limits(prices, moved),
        *_narrowed(prices, [each for one in moved for each in _crossings(one, steps[one.name])]),
    ]
    sliders = []
    for setting, low in zip(settings, ends[::2], strict=True):
        own = steps.get(setting.name, np.tile(low, (len(setting.values), 1)))
        nearest = sorted((tie for tie in ties if tie.setting is setting), key=lambda tie: (abs(tie.far), tie.plan))
        sliders.append(Slider(setting, own, bool((own.min(axis=0) < own.max(axis=0)).any()), tuple(nearest)))
    return tuple(sliders)


class _Prices:
    """Prices plans with one setting changed at a time, many settings at once. Orders and layouts stay."""

    def __init__(self, plans: Sequence[PricedPlan]) -> None:
        self.plans = [replace(plan.planned, placed=plan.planned.layout) for plan in plans]
        self.orders = [order_of(plan.planned) for plan in plans]
        self.needed = np.array([plan.needed for plan in plans])
        self.now = np.array([plan.step for plan in plans])
        self.problem = self.plans[0].problem
        self.own = np.concatenate([self.problem.vectors[name] for name in NAMES], axis=1)

    def steps(self, changes: Sequence[tuple[Setting, float]], only: Sequence[int] = ()) -> Floats:
        """[changes, plans] seconds; infinite where a plan does not fit. changes: settings with their values.

        only: numbers of the plans to price, all without one. The others have the step of the present values.
        """
        steps, numbers = np.tile(self.now, (len(changes), 1)), [*only] or [*range(len(self.plans))]
        plans, orders = [self.plans[each] for each in numbers], [self.orders[each] for each in numbers]
        by_constant = [place for place, (setting, _) in enumerate(changes) if setting.at is None]
        if by_constant:
            vectors = np.tile(self.own, (len(by_constant), 1))
            for row, place in enumerate(by_constant):
                setting, value = changes[place]
                vectors[row, NAMES.index(setting.name)] = value
            steps[np.ix_(by_constant, numbers)] = plan_seconds(plans, ConstantVectors.of(NAMES, vectors), orders).T
        problems = {
            place: setting.at(value)
            for place, (setting, value) in enumerate(changes)
            if setting.at is not None and setting.name != USABLE
        }
        if problems:
            there = [replace(plan, problem=problem) for problem in problems.values() for plan in plans]
            seconds = plan_seconds(there, self.problem.vectors, orders * len(problems))
            steps[np.ix_([*problems], numbers)] = seconds.reshape(len(problems), -1)
        for place, (setting, value) in enumerate(changes):
            if setting.name == USABLE:
                steps[place][self.needed > value * self.problem.cluster.device.hbm_bytes * (1 + 1e-12)] = np.inf
        return steps


@dataclass(frozen=True)
class _Crossing:
    """Two values of a setting, the nearer one first, between which the order of a plan and the first one changes.

    gaps: share of the first plan's step by which the plan takes longer, at both values. The gap that stays is
    halved, so that the next line meets 0 beyond it (Dowell and Jarratt, 1971, "Illinois"). gap, step: of the
    farther value, as they are. stays: which of both values stayed last, -1 at first.
    """

    setting: Setting
    plan: int
    values: tuple[float, float]
    gaps: tuple[float, float]
    gap: float
    step: float
    stays: int = -1

    @property
    def tie(self) -> EqualSteps:
        """At the farther value."""
        return EqualSteps(self.setting, self.plan, self.values[1], self.step)

    @property
    def met(self) -> bool:
        return bool(self.setting.whole or abs(self.gap) <= EQUAL)

    @property
    def between(self) -> float:
        """The value where a line through both gaps meets 0, by logarithms."""
        (low, high), (near, far) = (log(value) for value in self.values), self.gaps
        share = min(max(near / (near - far), 1e-4), 1.0 - 1e-4)
        return exp(low + share * (high - low))

    def cut(self, value: float, steps: Floats) -> _Crossing:
        """The part that has the change. steps: [2] seconds of the first plan and of this one at a value inside."""
        gap = float(steps[1] / steps[0] - 1.0)
        if (gap > 0) == (self.gaps[0] > 0) and gap != 0:
            far = self.gaps[1] * (0.5 if self.stays == 1 else 1.0)
            return replace(self, values=(value, self.values[1]), gaps=(gap, far), stays=1)
        near = self.gaps[0] * (0.5 if self.stays == 0 else 1.0)
        ends = (self.values[0], value), (near, gap)
        return replace(self, values=ends[0], gaps=ends[1], gap=gap, step=float(steps[1]), stays=0)


def _crossings(setting: Setting, steps: Floats) -> Iterator[_Crossing]:
    """The nearest changes of the first plan's order with each other plan, one on each side at most."""
    if setting.name == USABLE:
        return
    now, last = setting.values.index(setting.value), len(setting.values)
    for plan in range(1, steps.shape[1]):
        gaps = (steps[:, plan] / steps[:, 0] - 1.0).tolist()
        if abs(gaps[now]) <= EQUAL:
            continue
        for side in (range(now, -1, -1), range(now, last)):
            ends = next(((a, b) for a, b in pairwise(side) if gaps[a] * gaps[b] <= 0), None)
            if ends is not None:
                near, far = ends
                values = setting.values[near], setting.values[far]
                yield _Crossing(setting, plan, values, (gaps[near], gaps[far]), gaps[far], float(steps[far, plan]))


def _narrowed(prices: _Prices, crossings: list[_Crossing]) -> Iterator[EqualSteps]:
    """The tie of each crossing: all are narrowed at once, until both plans take equally long."""
    for _ in range(_ROUNDS):
        yield from (each.tie for each in crossings if each.met)
        crossings = [each for each in crossings if not each.met]
        if not crossings:
            return
        values = [each.between for each in crossings]
        changes = [(each.setting, value) for each, value in zip(crossings, values, strict=True)]
        steps = prices.steps(changes, sorted({0, *(each.plan for each in crossings)}))
        crossings = [
            each.cut(value, row[[0, each.plan]]) for each, value, row in zip(crossings, values, steps, strict=True)
        ]
    yield from (each.tie for each in crossings)


def _limits(prices: _Prices, settings: Sequence[Setting]) -> Iterator[EqualSteps]:
    """Where the first plan stops to fit: with the fastest plan that holds less."""
    smaller = np.flatnonzero(prices.needed < prices.needed[0])
    for setting in settings:
        share = prices.needed[0] / prices.problem.cluster.device.hbm_bytes
        if setting.name == USABLE and smaller.size:
            plan = int(smaller[prices.now[smaller].argmin()])
            yield EqualSteps(setting, plan, float(share), float(prices.now[plan]))
