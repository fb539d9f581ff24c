"""The evaluation program of a training program: the same forwards in the same order, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.ir.communicators import communicators_like
from schedc.ir.ops import OpKind
from schedc.ir.program import Program, computation
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.program.insert_communication import insert_communication


def forward_only(training: Program | Schedule, costs: Costs | None = None) -> Program:
    """The program that runs every forward of ``training`` and hands its outputs on; no REDUCE, no backward.

    A pair becomes its forward. The program cannot deadlock if the training order does not. A forward waits only for
    forwards: a legal order stays legal when cut down to the forwards. The messages keep their communicators: a program
    for one communicator also runs on several.
    """
    schedule = training if isinstance(training, Schedule) else computation(training)[0]
    rows = np.flatnonzero(schedule.kind == OpKind.F)
    forwards = replace(schedule.only(rows), pair=np.full(rows.size, -1, np.int32))
    program = insert_communication(forwards, costs)
    if not isinstance(training, Program):
        return program
    queues = communicators_like(program, training)
    return replace(program, source_name=training.source_name, communicators=queues)
