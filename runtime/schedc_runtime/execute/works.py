"""What START and JOIN of each kind of work do: a row per kind. Works run beside compute, on the lanes of their rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schedc_runtime.execute.operands import ReplicatedStage, WorkOperands
from schedc_runtime.execute.registers import Registers


class WorkHalves(NamedTuple):
    """START and JOIN of a kind of work, of one microbatch on one stage, or of a whole stage.

    start: returns the bytes that move. ready: whether the join would not block, where other ranks take part.
    """

    start: Callable[[Any, int], int]
    join: Callable[[Any, int], Any]
    ready: Callable[[Any], bool] | None = None


def _replicated(start: Callable[[ReplicatedStage], int], join: Callable[[ReplicatedStage], Any]) -> WorkHalves:
    return WorkHalves(lambda stage, m: start(stage), lambda stage, m: join(stage), lambda stage: stage.ready())


WORKS: Mapping[str, WorkHalves] = {
    "offload": WorkHalves(lambda stage, m: stage.start_offload(m), lambda stage, m: stage.join_offload(m)),
    "fetch": WorkHalves(lambda stage, m: stage.start_fetch(m), lambda stage, m: stage.join_fetch(m)),
    "gather": _replicated(lambda stage: stage.start_gather(), lambda stage: stage.join_gather()),
    "drop": _replicated(lambda stage: 0, lambda stage: stage.drop()),
    "scatter": _replicated(lambda stage: stage.start_scatter(), lambda stage: stage.join_scatter()),
    "spread": _replicated(lambda stage: stage.start_spread(), lambda stage: stage.join_spread()),
    "snapshot": WorkHalves(lambda stage, _: stage.start_snapshot(), lambda stage, _: stage.join_snapshot()),
}
"""By the name that programs have for the kind."""


def start_work(registers: Registers, op: WorkOperands) -> bool | None:
    """START: begins a work, and never waits, but for a sum of gradients that another REDUCE completes."""
    if op.after_sums and not registers.finish_sums():
        return True
    registers.works[op.work] = WORKS[op.kind].start(op.stage, op.microbatch)
    return None


def join_work(registers: Registers, op: WorkOperands) -> bool | None:
    """JOIN: compute goes on behind the work. On a GPU the host waits for nothing."""
    if op.work not in registers.works:
        what = f"microbatch {op.microbatch}" if op.microbatch >= 0 else f"stage {op.stage.index}"
        raise LookupError(f"the program joins the {op.kind} of {what} before its START")
    work = WORKS[op.kind]
    if registers.cooperative and work.ready is not None and not work.ready(op.stage):
        return True
    del registers.works[op.work]
    work.join(op.stage, op.microbatch)
    return None
