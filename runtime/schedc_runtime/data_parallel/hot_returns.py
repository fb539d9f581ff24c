"""Returns the gradients of copied experts to their owners, behind the last weight gradients of each stage.

The owner's gradient is then whole, so that sums over copies and replicas of the stage take it like any other. Where
nothing is summed behind it, the return is completed at the end of the stream, beside the work of other stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from schedc.ir.ops import FACTS
from schedc.ir.program import Instruction, InstructionKind
from schedc_runtime.execute.code import Call, Code
from schedc_runtime.execute.registers import Registers
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.step_lender import StepLender
from schedc_runtime.ranks.exchange import Pending
from schedc_runtime.stage.stage import Stage


@dataclass(frozen=True)
class HotReturn:
    """Gradients of a layer's slots on their way to the owners; a `PendingSum`."""

    lender: StepLender
    exchanges: list[Pending]

    def ready(self) -> bool:
        return all(not each.communicator.cooperative or each.communicator.ready(each.handle) for each in self.exchanges)

    def finish(self) -> None:
        """Add them to the owner's gradients."""
        returned = []
        while self.exchanges:
            pending = self.exchanges.pop(0)
            returned.append(pending.communicator.wait(pending.handle))
        self.lender.take_back(returned)
        self.lender.tell_joined(gradients=True)


def with_hot_returns(code: Code, stages: Mapping[int, Stage], *, summed: bool) -> Code:
    """The code of a place with the returns of its stages, in which experts may be copied for a step.

    stages: those of the place, by index. summed: whether replicas sum the gradients of experts.
    """
    lenders = {index: held for index, stage in stages.items() if (held := lenders_of(stage))}
    last: dict[int, int] = {}
    copied: set[int] = set()
    for position, step in enumerate(code.steps):
        instruction = step.instruction
        if instruction.kind is InstructionKind.REDUCE and not instruction.is_tied:
            copied.add(instruction.stage)
        elif (stage := trained_by(instruction)) in lenders:
            last[stage] = position
    after: dict[int, list[Call]] = {}
    for stage, position in last.items():
        after.setdefault(position, []).extend(_calls(lenders[stage], summed or stage in copied))
    return code.woven({}, after) if after else code


def lenders_of(stage: Stage) -> tuple[StepLender, ...]:
    """Those of a stage's layers, in the order of the model."""
    return tuple(layer.lender for _, layer in moe_layers(stage.module) if layer.lender is not None)


def trained_by(instruction: Instruction) -> int:
    """The stage whose weight gradients an instruction completes, for one microbatch; -1 for none."""
    ops = instruction.ops if instruction.computes else ()
    return next((stage for kind, stage, _ in ops if FACTS[kind].weight), -1)


def _calls(lenders: Sequence[StepLender], whole: bool) -> Iterator[Call]:
    """The last layer's return first; those of two layers travel at a time. whole: whether to complete the last one."""
    before: StepLender | None = None
    for lender in reversed(lenders):
        yield _start, lender
        if before is not None:
            yield _finish, before
        before = lender
    if whole:
        yield _finish, before


def _start(registers: Registers, lender: StepLender) -> None:
    if exchanges := lender.give_back():
        registers.pending.append(HotReturn(lender, exchanges))


def _finish(registers: Registers, lender: StepLender) -> bool | None:
    """Complete a layer's return; True while it is still awaited."""
    mine = next((x for x in registers.pending if isinstance(x, HotReturn) and x.lender is lender), None)
    if mine is None:
        return None
    if not mine.ready():
        return True
    registers.pending.remove(mine)
    mine.finish()
    return None
