"""The training program without its Rs: nothing is worked out again ahead of a backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.cost.costs import Costs
from schedc.ir.ops import OpKind
from schedc.ir.program import Program, computation
from schedc.ir.recomputed import has_recomputation
from schedc.passes.insert_communication import insert_communication


def without_recomputation(program: Program, costs: Costs | None = None) -> Program:
    """The same program where it has no R. Its gradients have the same bits: R adds nothing to them."""
    if not has_recomputation(program):
        return program
    schedule, _ = computation(program)
    made = insert_communication(schedule.only(np.flatnonzero(schedule.kind != OpKind.R)), costs)
    return replace(made, source_name=program.source_name)
