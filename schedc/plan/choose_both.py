"""Chooses recomputation and offloads together, where a plan says `recompute auto` and `offload auto`.

Levels are chosen under a memory between the plan's own and that of a step without a cap; activations then leave until
the plan's memory holds. The ends of this range are recomputation alone and offload alone, so that no choice is longer
than the better of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from schedc.attachments.units import amount
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Plan
from schedc.layout.parts import Layout
from schedc.plan.apply import layer_costs
from schedc.plan.choose_recomputation import ChosenRecomputation, choose_recomputation
from schedc.plan.directives.base import Directives
from schedc.plan.held_memory import HeldMemory, held_memory
from schedc.plan.peak_memory import Away
from schedc.plan.place_works import Offloading, place_offloads
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies

_STEPS = 6
"""Memories that are tried between the plan's own and that of a step without a cap."""

Attach = Callable[[Plan], tuple[Dependencies, Costs, Dependencies | None]]
"""Carries a plan out on the order: dependencies, costs of the stages, and the order without Rs in bubbles."""


@dataclass(frozen=True, eq=False)
class ChosenBoth:
    """What was chosen together.

    recomputation: its levels, whose makespan, bound and peaks are with the offloads. held: what ranks hold without
    offloads.
    """

    recomputation: ChosenRecomputation
    offloading: Offloading
    dependencies: Dependencies
    costs: Costs
    written: Dependencies | None
    held: HeldMemory


def choose_both(
    directives: Directives,
    layout: Layout,
    costs: Costs,
    plan: Plan,
    dependencies: Dependencies,
    stages: Sequence[int],
    attach: Attach,
) -> ChosenBoth:
    """The shortest step of those tried; of equal ones that which recomputes least.

    costs: those of a layer. plan: without the levels of ``stages``.

    Raises `DiagnosticError` (S406) where neither levels nor offloads fit, with the least memory that levels need.
    """
    began = perf_counter()
    memory = directives.tree.memory
    assert memory is not None, "the lines were checked"
    cap = amount(memory)

    def levels_under(limit: float) -> ChosenRecomputation:
        return choose_recomputation(directives, layout, costs, plan, dependencies, stages, limit)

    tried: dict[float, ChosenBoth] = {}
    whole = levels_under(np.inf)
    for limit in [*np.linspace(cap, max(cap, *whole.held), _STEPS + 1)[:-1].tolist(), np.inf]:
        try:
            levels = whole if limit == np.inf else levels_under(limit)
        except DiagnosticError:  # these levels do not fit; without a limit all do
            continue
        order, of_stages, written = attach(levels.plan)
        layers = layer_costs(directives)
        held = held_memory(directives, levels.plan, layout, layers, order.schedule, of_stages)
        offloading = place_offloads(directives, levels.plan, layout, layers, order, held)
        peaks = held.peaks(Away(offloading.placed, order).of_ops)
        if (peaks <= cap * (1 + 1e-12)).all():
            priced = replace(levels, makespan=offloading.makespan, held=tuple(peaks.tolist()))
            tried[limit] = ChosenBoth(priced, offloading, order, of_stages, written, held)
    if not tried:
        levels_under(cap)  # says the least memory that levels need
    return _shortest(tried, cap, began)


def _shortest(tried: Mapping[float, ChosenBoth], cap: float, began: float) -> ChosenBoth:
    """The choice of the shortest step. tried: by limit of the levels' memory, ascending."""
    makespans = {limit: both.offloading.makespan for limit, both in tried.items()}
    enough = min(makespans.values()) * (1 + 1e-9)
    best = next(both for both in reversed(list(tried.values())) if both.offloading.makespan <= enough)
    chosen = replace(
        best.recomputation,
        bound=min(best.recomputation.uncapped, best.recomputation.makespan),
        limit=cap,
        one_level=None,
        level_per_stage=None,
        tried=sum(both.recomputation.tried for both in tried.values()),
        seconds=perf_counter() - began,
        alone=(makespans.get(cap), makespans.get(np.inf)),
    )
    return replace(best, recomputation=chosen)
