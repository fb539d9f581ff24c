"""Refuses what other trainers cannot express: each finding says what, why, and the nearest that they can."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from schedc.analysis.work_runs import WorkRuns
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.placement import Placement
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.ir.works import WorkKind
from schedc.source import NOWHERE, Source
from schedc.syntax.tree import SizeParameter


def cannot(code: str, message: str, why: str, nearest: str, source: Source | None) -> DiagnosticError:
    """The error (codes S6) for a target. The caller raises it."""
    notes = (why,) if why else ()
    return DiagnosticError([Diagnostic(code, message, Label(NOWHERE), notes=notes, help=nearest, source=source)])


def one_copy(placement: Placement, target: str, source: Source | None) -> None:
    """Raise S603 for a schedule with two pipes on different ranks: a stage is then on two ranks."""
    apart = np.flatnonzero((placement.rank_of_stage != placement.rank_of_stage[0]).any(0))
    if not apart.size:
        return
    stage = int(apart[0])
    ranks = " and ".join(str(rank) for rank in sorted(set(placement.rank_of_stage[:, stage].tolist())))
    raise cannot(
        "S603",
        f"{target} has no schedule with two directions",
        f"stage {stage} would live on ranks {ranks}; there a stage lives on one, and nothing sums its two copies",
        "`dualpipev` is the nearest: the same overlap with one copy of each stage, on half as many ranks",
        source,
    )


def foreign_kind(order: Schedule | Program) -> OpKind | None:
    """The first kind of op in an order that other trainers lack; None if they have all kinds."""
    return next((kind for kind in FACTS if not FACTS[kind].exported and (order.kind == kind).any()), None)


def only_exported_kinds(order: Schedule | Program, target: str) -> None:
    """Raise S609 for an order with a kind of op that other trainers lack, such as R (`schedc.ir.ops.FACTS`)."""
    kind = foreign_kind(order)
    if kind is None:
        return
    why, nearest = _NO_SUCH_OP.get(kind, ("", f"leave the {kind.name}s out"))
    nearest = f"{nearest}; `text`, `program`, `json`, `trace` and `dot` have them"
    raise cannot("S609", f"{target} has no op for {FACTS[kind].name}", why, nearest, order.source)


_NO_SUCH_OP = {
    OpKind.R: (
        "there a backward recomputes inside of itself, by what its modules do, and nothing can be placed ahead of it",
        "leave the Rs out, as `recompute` of a plan without `in bubbles` does",
    ),
}
"""By kind of op: why other trainers have no such op, and the nearest that they have."""


def no_segments(parameters: Iterable[SizeParameter], schedule: Schedule, target: str) -> None:
    """Raise S607 for sequences cut into segments. Other trainers would run them as independent microbatches.

    parameters: the size parameters of the schedule.
    """
    if not any(p.role == "segments" and schedule.sizes.get(p.name, 1) > 1 for p in parameters):
        return
    why = "the attention of a segment reads what the segments before it left: there each microbatch stands alone"
    raise cannot("S607", f"{target} has no segments of a sequence", why, "`1f1b` is the nearest", schedule.source)


def no_works(works: WorkRuns | None, target: str, source: Source | None) -> None:
    """Raise S613 for a plan that moves activations to host memory, for a target that has no works."""
    if works is None or not len(works):
        return
    moved = int((works.works.kind == WorkKind.OFFLOAD).sum())
    raise cannot(
        "S613",
        f"{target} has no copies to host memory, and the plan moves {moved} activations there",
        "without them ranks hold more than the plan's `memory` says",
        "leave `offload` out of the plan; `program`, `json` and `trace` have the copies",
        source,
    )


def placement_form(placement: Placement) -> tuple[str, int] | None:
    """The placement of the first pipe: ("loop", chunks), ("v", 2), or None if other. Linear is a loop of one chunk."""
    home, ranks = placement.rank_of_stage[0], placement.ranks
    stages = np.arange(placement.stages)
    if placement.stages % ranks == 0 and (home == stages % ranks).all():
        return "loop", placement.stages // ranks
    if placement.stages == 2 * ranks and (home == np.minimum(stages, 2 * ranks - 1 - stages)).all():
        return "v", 2
    return None
