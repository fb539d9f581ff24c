"""Warns where tensor and context ranks fit a plan's memory only without what they gather and keep.

The memory of a plan counts own rows, as Megatron-LM keeps them. This runtime keeps the inputs of cores whole.
"""

from __future__ import annotations

from dataclasses import replace

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.arrays import Floats
from schedc.ir.parallel import Parallel
from schedc.plan.counts.split_ranks import kept_gathered
from schedc.plan.held_memory import HeldMemory
from schedc.plan.peak_memory import MemoryBesideWorks
from schedc.plan.worst_routing import beyond_limit
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.syntax.plan import PlanTree


def beyond_gathered(
    tree: PlanTree, held: HeldMemory, dependencies: Dependencies, placed: PlacedWorks | None
) -> Diagnostic | None:
    """The warning (S414) for a plan with tensor or context ranks that fit without what they gather alone.

    placed: works beside the cells, whose offloads move none of what is gathered.
    """
    line, split = tree.memory, held.plan.parallel or Parallel()
    if line is None or not line.unit or split.tp * split.cp == 1:
        return None
    if (more := kept_gathered(held.plan, held.layout)) is None:
        return None
    whole = with_gathered(held, more)
    beyond = beyond_limit(line, MemoryBesideWorks(whole, dependencies, placed or PlacedWorks.none()), "holds")
    if beyond is None:
        return None
    again = "" if split.tp == 1 else "write `recompute layer`, which keeps own rows alone, "
    return Diagnostic(
        "S414",
        f"{beyond}: with what tensor and context ranks gather and keep in this runtime",
        Label(line.span),
        help=f"{again}allow more memory, or use a schedule that holds fewer microbatches",
        source=tree.source,
    )


def with_gathered(held: HeldMemory, more: Floats) -> HeldMemory:
    """Adds what ranks gather to what they hold. more: [2, stages] of `kept_gathered`."""
    of = held.of_stage
    costs = replace(
        held.costs,
        activation=tuple((of.activation + more[0]).tolist()),
        pending_weight=tuple((of.pending_weight + more[1]).tolist()),
        recomputed=tuple((of.recomputed + more[0]).tolist()),
        restored=tuple((of.restored + more[1]).tolist()),
    )
    return replace(held, costs=costs)
