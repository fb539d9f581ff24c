"""Registers of one rank: everything that handlers may read and write while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from schedc_runtime.execute.operands import ComputeOperands
from schedc_runtime.execute.tied_sums import TiedSum
from schedc_runtime.transport.base import Handle, MessageForm, Transport


class PendingSum(Protocol):
    """A sum of gradients that an instruction has started, completed when the stream has ended."""

    def ready(self) -> bool:
        """Whether `finish` would not block; always true unless ranks share a process."""
        ...

    def finish(self) -> None:
        """Wait for the sum and put it into the gradients."""
        ...


class Registers:
    """Values, messages and sums of one rank during one step.

    slot_names: what each slot holds, for errors. handles: how many messages the stream posts.
    transport: carries the messages between stages and the sums between two copies of a stage.
    device: where receive buffers are made.
    """

    def __init__(
        self,
        slot_names: Sequence[str],
        handles: int,
        transport: Transport,
        device: torch.device,
        forms: Sequence[MessageForm] = (),
    ) -> None:
        self.slot_names, self._handle_count = slot_names, handles
        self.forms = forms
        """What messages carry, of the current input signature (`schedc_runtime.execute.operands.message_forms`)."""
        self.transport, self.device = transport, device
        self.cooperative = transport.cooperative
        """Whether a WAIT must return rather than block, since other ranks run in this process."""
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self.values: list[Any] = [None] * len(self.slot_names)
        """[slots] activations and gradients on their way between instructions."""
        self.handles: list[Any] = [None] * self._handle_count
        """[handles] the transport's handle of each posted message."""
        self.targets: Sequence[Any] = ()
        """[M] what the loss function gets."""
        self.loss_scale = 1.0
        """Factor of each microbatch's loss in the gradients."""
        self.probing = False
        """Whether forwards leave `probes`."""
        self.probes: list[tuple[ComputeOperands, Tensor]] = []
        """[outputs of forwards] the sum of each output, with its forward. It is finite if the output is."""
        self.tied: dict[int, TiedSum] = {}
        """By the number of a tie: the sum whose exchanges have begun."""
        self.works: dict[int, int] = {}
        """By the number of a work that has been started and not joined: the bytes that move."""
        self.pending: list[PendingSum] = []
        """Sums of gradients in the order in which they were started."""

    def take(self, slot: int) -> Any:
        """The value of a slot, which is then empty: every value has one consumer."""
        value = self.values[slot]
        if value is None:
            raise LookupError(f"the program uses {self.slot_names[slot]} before it is there")
        self.values[slot] = None
        return value

    def posted(self, index: int) -> Handle:
        """The transport's handle of a posted message."""
        if (handle := self.handles[index]) is None:
            raise LookupError("the program waits for a message that it has not posted")
        return handle

    def finish_sums(self) -> bool:
        """Complete the pending sums in their order; False if the first one left must still be waited for."""
        while self.pending:
            if not self.pending[0].ready():
                return False
            self.pending.pop(0).finish()
        return True

    def leftovers(self) -> list[str]:
        """What a complete step must not leave behind: values not used, messages and works not waited for."""
        if not self.works and _all_none(self.values) and _all_none(self.handles):
            return []
        values = [name for name, value in zip(self.slot_names, self.values, strict=True) if value is not None]
        messages = [f"message {i}" for i, handle in enumerate(self.handles) if handle is not None]
        return values + messages + [f"work {number}" for number in self.works]


def _all_none(places: list[Any]) -> bool:
    return places.count(None) == len(places)
