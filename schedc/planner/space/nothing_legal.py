"""Says why a space has no plan: the constraint that took the last plans, and the nearest values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.diagnostics import Diagnostic, RequestError
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.planner.space.conditions import INNER
from schedc.planner.space.space import OUTER, PlanSpace, listed


def refuse_nothing_legal(space: PlanSpace) -> None:
    """Raises `RequestError` (S712) for a space without a plan."""
    if _unplaceable(space.model):
        message = (
            f"no plan can place the layers of {space.model.name}: "
            "layers without experts follow layers with experts, and a plan has them in front"
        )
        help = "write a model file whose first layers are the dense ones"
        raise RequestError([Diagnostic("S712", message, help=help)])
    refuse_nothing_met(space)
    if next(space.blocks(), None) is not None:
        return
    before, ordered = space.met[-1].combinations, space.ordered
    if not ordered.combinations:
        raise _refusal(space, ordered.what, before)
    conditions = [condition for condition in space.conditions if condition.names & INNER]
    for number, condition in enumerate(conditions):
        outer = (each for each in space.conditions if not each.names & INNER)
        met = replace(space, conditions=(*outer, *conditions[: number + 1]))
        if next(met.blocks(), None) is None:
            raise _refusal(space, condition.option, ordered.combinations)


def refuse_nothing_met(space: PlanSpace) -> None:
    """Raises `RequestError` (S712) for a space whose outer axes have no values that meet all laws and conditions.

    No schedule is read for it. `refuse_nothing_legal` asks this first.
    """
    before = 0
    for remaining in space.met:
        if not remaining.combinations:
            raise _refusal(space, remaining.what, before)
        before = remaining.combinations


def _unplaceable(model: ModelSizes) -> bool:
    """Whether layers without experts follow layers with experts."""
    kinds = model.kinds
    return LayerKind.MOE in kinds and LayerKind.DENSE in kinds[kinds.index(LayerKind.MOE) :]


def _refusal(space: PlanSpace, what: str, before: int) -> RequestError:
    asked = f"{space.model.name} on {space.cluster.devices:,} devices with {space.batch:,} x {space.seq:,} tokens"
    notes = (f"{before:,} combinations of outer axes meet all constraints before it",) if before else ()
    message = f"no plan for {asked}: none is left by `{what}`"
    return RequestError([Diagnostic("S712", message, notes=notes, help=_nearest(space, what))])


def _nearest(space: PlanSpace, what: str) -> str:
    """What to ask for in place of what has no plan."""
    if "sequences are" in what:
        near = nearest_batches(space)
        return f"batches that a plan of these devices divides, nearest first: {', '.join(f'{each:,}' for each in near)}"
    if what.startswith("--"):
        return _met_alone(space, what) or "leave the condition out, or weaken an earlier condition"
    if "devices are" in what:
        values = space.values
        return f"tp is one of {listed(values.tp)}, cp of {listed(values.cp)}, pp of {listed(values.pp)}"
    return "take another number of devices or another batch, or `--space wide`"


def _met_alone(space: PlanSpace, what: str) -> str:
    """Which values the axes of a condition have, where no combination of them meets it alone; else nothing."""
    condition = next(each for each in space.conditions if each.option == what)
    if condition.names & INNER or condition.holds(space.grid).any():
        return ""
    asked = [name for name in OUTER if name in condition.names]
    return "; ".join(f"{name} is one of {listed(getattr(space.values, name))}" for name in asked)


def nearest_batches(space: PlanSpace, count: int = 3) -> list[int]:
    """The batches nearest to the one asked for that some dp and microbatch of the space divide, nearest first."""
    grid = space.grid
    whole = grid["devices"] == space.used
    share = np.unique(grid["dp"][whole] * grid["microbatch"][whole])
    below = np.maximum(1, space.batch // share) * share
    near = {int(batch) for batch in (*below, *(below + share))}
    return sorted(near, key=lambda batch: (abs(batch - space.batch), batch))[:count]
