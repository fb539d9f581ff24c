"""Bound code: the instruction stream of one rank as calls of handlers, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from schedc.ir.program import Channel, Instruction
from schedc_runtime.execute.registers import Registers
from schedc_runtime.transport.base import MessageForm

Handler = Callable[[Registers, Any], bool | None]
"""Runs one step, given its operands. True means: not possible yet, come back (cooperative transports only)."""

Call = tuple[Handler, Any]
"""A handler and its operands."""

BESIDE = "beside"
"""The label of further calls that belong to an instruction."""


class BoundStep(NamedTuple):
    """One call, and the instructions of the program that are run.

    row: first of ``width`` rows of the program. More than one row are messages that are posted together.
    instruction: of ``row``. label: the micro-step, as ``run backward of 0.experts``; "" for the whole instruction.
    """

    handler: Handler
    operands: Any
    row: int
    width: int
    instruction: Instruction
    label: str = ""


@dataclass(frozen=True)
class Code:
    """The stream of one rank, ready to run.

    steps: in the order of execution. slot_names: [slots] what each value is, for errors.
    handles: how many messages are posted.
    slots: by channel, stage and microbatch, the slot of what the stage produces; stage -1 is the batch.
    forms: what messages carry, of the boundaries that the stream was bound with.
    """

    steps: list[BoundStep]
    slot_names: list[str]
    handles: int
    slots: Mapping[tuple[int, int, int], int]
    forms: tuple[MessageForm, ...] = ()

    @cached_property
    def calls(self) -> list[Call]:
        """[steps] handler and operands, which is all that the executor's loop reads."""
        return [(step.handler, step.operands) for step in self.steps]

    @cached_property
    def inputs(self) -> dict[int, int]:
        """Slot of the first stage's arguments, by microbatch; empty where no first stage is held."""
        entering = (Channel.ACTIVATION, -1)
        return {key[2]: slot for key, slot in self.slots.items() if key[:2] == entering}

    def woven(self, before: Mapping[int, Sequence[Call]], after: Mapping[int, Sequence[Call]]) -> Code:
        """The code with further calls before and after some of its steps, given by position.

        Errors and traces count each further call to the instruction of its step, as its part ``beside``.
        """
        steps: list[BoundStep] = []
        for position, step in enumerate(self.steps):
            steps += [_beside(step, call) for call in before.get(position, ())]
            steps.append(step)
            steps += [_beside(step, call) for call in after.get(position, ())]
        return replace(self, steps=steps)


def _beside(step: BoundStep, call: Call) -> BoundStep:
    return step._replace(handler=call[0], operands=call[1], width=1, label=BESIDE)
