"""Finds the microbatches that an R recomputes between their forward and their backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule

if TYPE_CHECKING:
    from schedc.ir.program import Program


def recomputed_ops(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """[ops] whether the microbatch of an op has an R on the op's stage; true of the R itself."""
    rows = np.flatnonzero(schedule.kind == OpKind.R)
    if not rows.size:
        return np.zeros(len(schedule), bool)
    marked = np.zeros((schedule.stages, schedule.microbatches), bool)
    marked[schedule.stage[rows], schedule.microbatch[rows]] = True
    return np.asarray(marked[schedule.stage, schedule.microbatch])


def has_recomputation(order: Schedule | Program) -> bool:
    """Whether there is an R."""
    return bool((order.kind == OpKind.R).any())


def recomputed_slots(order: Schedule | Program) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of every R: instructions have the values of ops."""
    rows = np.flatnonzero(order.kind == OpKind.R)
    return frozenset(zip(order.stage[rows].tolist(), order.microbatch[rows].tolist(), strict=True))
