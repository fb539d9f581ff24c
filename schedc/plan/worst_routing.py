"""Warns where ranks could exceed the memory of a plan because the router sends them more rows than the mean.

Copies for a step prove nothing of the rows of a microbatch, and those in several nodes leave nodes uneven. A step that
overflows its bounded sizes runs again with exact sizes. Memory counts mean rows, or the bound.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.arrays import Floats
from schedc.ir.plan import Plan
from schedc.plan.counts.layers import layer_of_kind
from schedc.plan.counts.rows import worst_case_rows
from schedc.plan.held_memory import HeldMemory
from schedc.plan.layout.parts import WITH_EXPERTS, WORK, layers_in
from schedc.plan.peak_memory import MemoryBesideWorks
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.syntax.plan import MemoryLine, PlanTree
from schedc.units import amount, shown


def worst_routing(
    tree: PlanTree, held: HeldMemory, dependencies: Dependencies, placed: PlacedWorks | None
) -> Diagnostic | None:
    """The warning (S413) for a plan with `balance` or bounded sizes whose ranks fit at the mean rows alone.

    Every microbatch in flight is taken to have the worst routing. placed: works beside the cells.
    """
    line, plan = tree.memory, held.plan
    if line is None or not line.unit or (plan.balance is None and plan.bound is None):
        return None
    more, most = beyond_mean(held), worst_case_rows(plan)
    worst = replace(held, slots=replace(held.slots, in_flight=held.slots.in_flight + more))
    beyond = beyond_limit(line, MemoryBesideWorks(worst, dependencies, placed or PlacedWorks.none()), "could hold")
    if most is None or beyond is None:
        return None
    assert plan.experts is not None
    message = f"{beyond}: a router may send it {most.experts / plan.experts.top:.3g} times the mean rows"
    return Diagnostic("S413", message, Label(line.span), help=_help(plan), source=tree.source)


def beyond_limit(line: MemoryLine, memory: MemoryBesideWorks, verb: str) -> str | None:
    """What the fullest rank holds beside what the plan allows, as text; None where it fits. verb: before the bytes."""
    limit, rank = amount(line.limit, line.unit), int(np.argmax(memory.peaks))
    if memory.peaks[rank] <= limit * (1 + 1e-12):
        return None
    op = memory.dependencies.schedule.op(memory.peak(rank).row)
    held = shown(memory.peaks[rank], up=True)
    return f"rank {rank} {verb} {held} at {op.stage}{op.kind.name}{op.microbatch}, and the plan allows {shown(limit)}"


def _help(plan: Plan) -> str:
    """Remedies; copies by microbatch bound rows where others do not."""
    evened = "" if plan.copies_by_microbatch or plan.bound is not None else "`balance by microbatch`, "
    return f"write {evened}`recompute adaptive 1.2`, or a level of `recompute` that holds no rows of experts"


def beyond_mean(held: HeldMemory) -> Floats:
    """[stages] what the worst routing adds to what a microbatch holds; 0 at adaptive levels, which count it already."""
    plan, layout = held.plan, held.layout
    most, more = worst_case_rows(plan), np.zeros(len(layout.stages))
    for stage, parts in enumerate(layout.stages if most else ()):
        recompute, layers = plan.recompute_of(stage), layers_in(parts)
        for part, level in zip(layers, recompute.of_layers_up_to(len(layers)), strict=True):
            layer = layer_of_kind(plan, part.kind)
            if layer is None or part.kind not in WITH_EXPERTS or recompute.adaptive is not None:
                continue
            share = (layer.held(level, rows=most) - layer.held(level)) / layer.held()
            more[stage] += max(0.0, share) * held.layers.activations[WORK.index(part.kind)]
    return more
