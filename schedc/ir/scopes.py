"""Which stages a line of a plan speaks of, and which line a stage follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import numpy as np

from schedc.ir.placement import Placement
from schedc.ir.plan import Plan


class Scoped(Protocol):
    """A request for all stages, for chunks or for stages."""

    @property
    def scope(self) -> str: ...
    @property
    def numbers(self) -> tuple[int, ...]: ...


Line = TypeVar("Line", bound=Scoped)

SCOPES = ("all", "chunk", "stage")
"""From the least to the most special; where two lines speak of a stage, the more special one is taken."""


def stages_of(request: Scoped, stages: int, placement: Placement | None) -> list[int]:
    """The stages that a line speaks of. One for chunks needs the placement."""
    if request.scope in ("all", "auto"):
        return list(range(stages))
    if request.scope == "stage" or placement is None:
        return list(request.numbers)
    held = placement.stage_of_chunk[:, list(request.numbers)]
    return sorted({int(stage) for stage in np.unique(held) if stage >= 0})


def missing(request: Scoped, placement: Placement) -> list[int]:
    """The chunks or stages of a line that the schedule does not have."""
    limit = {"chunk": placement.chunks, "stage": placement.stages}.get(request.scope, 0)
    return [number for number in request.numbers if number >= limit]


def is_chosen(plan: Plan) -> bool:
    """Whether the compiler chooses what leaves."""
    return any(rule.scope == "auto" for rule in plan.offload)


def line_per_stage(lines: Iterable[Line], stages: int, placement: Placement | None) -> dict[int, Line]:
    """The line that a stage follows, by stage; a more special line goes before others. lines: without `auto`."""
    followed: dict[int, Line] = {}
    for line in sorted(lines, key=lambda line: SCOPES.index(line.scope)):
        followed |= dict.fromkeys(stages_of(line, stages, placement), line)
    return followed
