"""Chooses the slices of stages for `slices auto`: each candidate is the step under another plan, priced from inside.

Numbers of slices are those that the costs have a factor for. Without one, more slices would cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from schedc.cell.predict import hidden_share
from schedc.diagnostics import DiagnosticError
from schedc.ir.contradictions import first_contradiction
from schedc.ir.plan import Plan
from schedc.plan.candidates import SAME_STEP, ChosenSlices, PricedSlices
from schedc.plan.passes import Step, lower


def choose_slices(step: Step) -> tuple[Plan, ChosenSlices]:
    """The plan with the slices of the shortest step, and all candidates. Among equal steps the first one is taken."""
    table = step.given.cell
    counts = () if table is None else tuple(factor.slices for factor in table.costs.slices)
    if not counts:
        whole_plan = replace(step.plan, slices_of_tokens=False)
        return whole_plan, ChosenSlices((), PricedSlices(whole_plan))
    chunks, whole = step.schedule.placement.chunk_of[0].tolist(), (1,) * step.schedule.stages
    priced = [_priced(step, (count,) * len(whole)) for count in (1, *counts)]
    best = _shortest(priced)
    for chunk in sorted(set(chunks)) if len(set(chunks)) > 1 else ():
        known = {each.plan.slices or whole for each in priced}
        others = _with_chunk(best.plan.slices or whole, chunks, chunk, (1, *counts))
        priced += [_priced(step, slices) for slices in others if slices not in known]
        best = _shortest(priced)
    return best.plan, ChosenSlices(tuple(priced), best)


def _shortest(priced: Sequence[PricedSlices]) -> PricedSlices:
    least = min(each.makespan for each in priced)
    return next(each for each in priced if each.makespan <= least * (1 + SAME_STEP))


def _with_chunk(
    slices: Sequence[int], chunks: Sequence[int], chunk: int, counts: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """``slices`` [stages] with each of the numbers in the stages of a chunk. chunks: [stages]."""
    for count in counts:
        yield tuple(count if own == chunk else before for before, own in zip(slices, chunks, strict=True))


def _priced(step: Step, slices: tuple[int, ...]) -> PricedSlices:
    """The step with ``slices`` [stages]."""
    sliced = max(slices) > 1
    of_tokens = step.plan.slices_of_tokens and sliced
    plan = replace(step.plan, slices=slices if sliced else (), slices_of_tokens=of_tokens)
    if refused := first_contradiction(plan):
        return PricedSlices(plan, refused=refused)
    try:
        inside = lower(replace(step, plan=plan, done=step.done | {"choose slices"}), "inside").inside
    except DiagnosticError as error:
        return PricedSlices(plan, refused=error.diagnostics[0].message)
    assert inside is not None
    whole, pairs = inside.communication(), inside.communication(pairs_only=True)
    alone = whole[0] - pairs[0], whole[1] - pairs[1]
    shares = [hidden_share(*each) if each[0] else None for each in (alone, pairs)]
    return PricedSlices(plan, inside.late_wait.makespan, shares[0], shares[1])
