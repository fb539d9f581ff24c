"""Chooses the levels that a plan leaves to the compiler: alone, or together with offloads under `offload auto`.

Together, levels are chosen under a memory between the plan's own and that of a step without a cap. Activations then
leave until the plan's memory holds. The ends of this range are recomputation alone and offload alone, so that no
choice is longer than the better of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Plan
from schedc.ir.scopes import is_chosen
from schedc.plan.apply import stage_costs
from schedc.plan.attached import place
from schedc.plan.choose_recomputation import ChosenRecomputation, choose_recomputation
from schedc.plan.directives.base import Directives
from schedc.plan.directives.recompute import auto_stages
from schedc.plan.held_memory import held_memory
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.parts import Layout
from schedc.plan.peak_memory import Away
from schedc.plan.place_works import Offloading, place_offloads
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.units import amount

_STEPS = 6
"""Memories that are tried between the plan's own and that of a step without a cap."""


@dataclass(frozen=True, eq=False)
class _Tried:
    """Levels that fit beside the offloads of their step. levels: with makespan and peaks of this step."""

    levels: ChosenRecomputation
    offloading: Offloading


def choose_levels(
    directives: Directives, layout: Layout, layers: LayerCosts, costs: Costs, plan: Plan, dependencies: Dependencies
) -> tuple[Plan, ChosenRecomputation | None]:
    """The plan with the levels that it leaves to the compiler, and what was chosen; None where it leaves none.

    costs: those of a layer. Raises `DiagnosticError` (S406) where nothing fits.
    """
    stages = auto_stages(directives, dependencies.schedule)
    if not stages:
        return plan, None
    assert directives.tree.memory is not None, "the lines were checked"
    cap = amount(directives.tree.memory.limit, directives.tree.memory.unit)

    def levels_under(limit: float) -> ChosenRecomputation:
        return choose_recomputation(directives, layout, costs, plan, dependencies, stages, limit)

    def fitting(levels: ChosenRecomputation) -> _Tried | None:
        of_stages = stage_costs(directives, layout, costs, levels.plan)
        order, of_stages, _ = place(None, levels.plan, layout, of_stages, dependencies)
        held = held_memory(directives, levels.plan, layout, layers, order.schedule, of_stages)
        offloading = place_offloads(directives, levels.plan, layout, layers, order, held)
        peaks = held.peaks(Away(offloading.placed, order).of_ops)
        fits = (peaks <= cap * (1 + 1e-12)).all()
        priced = replace(levels, makespan=offloading.makespan, held=tuple(peaks.tolist()))
        return _Tried(priced, offloading) if fits else None

    chosen = _both(levels_under, fitting, cap) if is_chosen(plan) else levels_under(cap)
    return chosen.plan, chosen


def _both(
    levels_under: Callable[[float], ChosenRecomputation],
    fitting: Callable[[ChosenRecomputation], _Tried | None],
    cap: float,
) -> ChosenRecomputation:
    """The levels of the shortest step of those tried with their offloads. Ties go to the least recomputation.

    levels_under: the levels under a limit of memory. fitting: the step of levels with offloads, None where it holds
    more than ``cap``. Raises `DiagnosticError` (S406) where neither levels nor offloads fit, with the least memory that
    levels need.
    """
    began, tried, whole = perf_counter(), dict[float, _Tried](), levels_under(np.inf)
    for limit in [*np.linspace(cap, max(cap, *whole.held), _STEPS + 1)[:-1].tolist(), np.inf]:
        try:
            levels = whole if limit == np.inf else levels_under(limit)
        except DiagnosticError:  # these levels do not fit; without a limit all do
            continue
        if (step := fitting(levels)) is not None:
            tried[limit] = step
    if not tried:
        levels_under(cap)  # says the least memory that levels need
    return _shortest(tried, cap, began)


def _shortest(tried: Mapping[float, _Tried], cap: float, began: float) -> ChosenRecomputation:
    """The levels of the shortest step. tried: by limit of the levels' memory, ascending."""
    makespans = {limit: step.offloading.makespan for limit, step in tried.items()}
    enough = min(makespans.values()) * (1 + 1e-9)
    best = next(step.levels for step in reversed(list(tried.values())) if step.offloading.makespan <= enough)
    return replace(
        best,
        bound=min(best.uncapped, best.makespan),
        limit=cap,
        one_level=None,
        level_per_stage=None,
        tried=sum(step.levels.tried for step in tried.values()),
        seconds=perf_counter() - began,
        alone=(makespans.get(cap), makespans.get(np.inf)),
    )
