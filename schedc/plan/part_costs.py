"""What times of parts say of a plan: times of its stages, of layers that are balanced, and of what levels recompute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.plan.layout.costs import PerKind, over_parts
from schedc.plan.layout.parts import WORK, Layout
from schedc.step.costs.costs import Costs
from schedc.step.costs.parts import OPS, PartCosts
from schedc.syntax.plan import PlanTree, TableLine


def check_parts(plan: PlanTree, costs: Costs) -> None:
    """Raise `DiagnosticError` (S411) for times of parts beside a plan that gives its layers times of its own."""
    line = next((line for line in plan.lines if isinstance(line, TableLine) and line.word == "costs"), None)
    if costs.parts is None or line is None:
        return
    where = f" of `{costs.source.name}`" if costs.source else ""
    message = f"`costs` says how long layers take, and so does the table [parts]{where}"
    help = "leave out the line `costs`, or the table"
    raise DiagnosticError([Diagnostic("S411", message, Label(line.span), help=help, source=plan.source)])


def with_times_of_parts(costs: Costs, layout: Layout) -> Costs:
    """The costs with F, I and W of each stage: the sum over its parts, and what each op takes. Others stay."""
    assert costs.parts is not None
    each = np.array([getattr(costs.parts, kind) for kind in WORK], np.float64)
    times = over_parts(layout.counts[:, : len(WORK)], each.T) + np.array(costs.parts.op, np.float64)[:, None]
    F, I, W = (tuple(column) for column in times.tolist())  # noqa: E741
    return replace(costs, F=F, I=I, W=W, parts=None, given=costs.given - {"parts"} | set(OPS))


def whole_times(parts: PartCosts) -> PerKind:
    """Time of all ops of a microbatch in a part of each kind."""
    return PerKind(*(sum(getattr(parts, kind)) for kind in WORK))


def forward_times(parts: PartCosts) -> PerKind:
    """Time of a forward in a part of each kind. A prediction has that of its layer: of a MoE one, else of a dense one.

    Levels recompute layers, and neither heads nor what a prediction has beside its layer.
    """
    forward = PerKind(*(getattr(parts, kind).F for kind in WORK))
    layer = forward.moe or forward.dense
    return forward._replace(mtp=min(forward.mtp, layer)) if layer else forward
