"""Removes the Rs from a training program: every backward recomputes inside itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.ir.ops import OpKind
from schedc.ir.program import Program, computation
from schedc.ir.recomputed import has_recomputation
from schedc.step.costs.costs import Costs
from schedc.step.program.insert_communication import insert_communication


def without_recomputation(program: Program, costs: Costs | None = None) -> Program:
    """The program without its Rs; gradients keep their bits, since an R adds nothing to them."""
    if not has_recomputation(program):
        return program
    schedule, _ = computation(program)
    made = insert_communication(schedule.only(np.flatnonzero(schedule.kind != OpKind.R)), costs)
    return replace(made, source_name=program.source_name)
