"""What START and JOIN of each kind of work do: a row per kind. Works run beside compute, on the lanes of their rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schedc_runtime.execute.operands import MovingStage, WorkOperands
from schedc_runtime.execute.registers import Registers


class WorkHalves(NamedTuple):
    """START and JOIN of a kind of work, of one microbatch on one stage. start: returns the bytes that move."""

    start: Callable[[MovingStage, int], int]
    join: Callable[[MovingStage, int], Any]


WORKS: Mapping[str, WorkHalves] = {
    "offload": WorkHalves(lambda stage, m: stage.start_offload(m), lambda stage, m: stage.join_offload(m)),
    "fetch": WorkHalves(lambda stage, m: stage.start_fetch(m), lambda stage, m: stage.join_fetch(m)),
}
"""By the name that programs have for the kind."""


def start_work(registers: Registers, op: WorkOperands) -> None:
    """START: begins a work, and never waits."""
    registers.works[op.work] = WORKS[op.kind].start(op.stage, op.microbatch)


def join_work(registers: Registers, op: WorkOperands) -> None:
    """JOIN: compute goes on behind the work. On a GPU the host waits for nothing."""
    if op.work not in registers.works:
        raise LookupError(f"the program joins the {op.kind} of microbatch {op.microbatch} before its START")
    del registers.works[op.work]
    WORKS[op.kind].join(op.stage, op.microbatch)
