"""Refuses what other trainers cannot express: each finding says the fact, the reason, and the nearest alternative."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.ir.works import WorkKind
from schedc.source import NOWHERE, Source
from schedc.step.work_runs import WorkRuns
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


def foreign_op(schedule: Schedule) -> str:
    """What of an order other trainers lack: the first op kind, as ``op R``, else ``pair F & W``; empty if nothing."""
    kind, pair = _foreign_kind(schedule), _weight_pair(schedule)
    return f"op {kind.name}" if kind is not None else pair and f"pair {pair}"


def only_exported_ops(schedule: Schedule, target: str) -> None:
    """Raise S609 for an order with a kind of op that other trainers lack, such as R (`schedc.ir.ops.FACTS`).

    Raise S615 for one with pairs that have a W.
    """
    kept = "`text`, `program`, `json`, `trace` and `dot` have them"
    if (kind := _foreign_kind(schedule)) is not None:
        why, nearest = _NO_SUCH_OP.get(kind, ("", f"leave the {kind.name}s out"))
        raise cannot("S609", f"{target} has no op for {FACTS[kind].name}", why, f"{nearest}; {kept}", schedule.source)
    if pair := _weight_pair(schedule):
        why = "there a cell overlaps a forward with a backward alone: the two ops would follow each other"
        nearest = f"write them one after the other, {pair.replace(' & ', '  ')} for {pair}"
        raise cannot("S615", f"{target} has no pair {pair}", why, f"{nearest}; {kept}", schedule.source)


def _foreign_kind(schedule: Schedule) -> OpKind | None:
    return next((kind for kind in FACTS if not FACTS[kind].exported and (schedule.kind == kind).any()), None)


def _weight_pair(schedule: Schedule) -> str:
    """The first pair of an order that has a W, as ``F & W``; empty if none has."""
    second = np.flatnonzero((schedule.pair[1:] >= 0) & (schedule.pair[1:] == schedule.pair[:-1])) + 1
    row = next(iter(second[schedule.kind[second] == OpKind.W].tolist()), 0)
    return f"{OpKind(int(schedule.kind[row - 1])).name} & W" if row else ""


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
