"""Copies of experts for a step: filled once and emptied once, on slots that every microbatch uses.

    rows of the last step --> choose --> copies of each rank --> [travel] --> slots --F, I, W of all microbatches-->
    the owner's gradient <-- [return] <-- gradients of the slots, in float32 at least

The rows of a step are summed on the device. Their copy to the host is complete when the next step begins, so that
nothing waits for it. `hot_slots` copies experts to all ranks, and `even_slots` from one rank to another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from schedc.cell.graph import Lane
from schedc_runtime.device.choice import HostCopy
from schedc_runtime.moe.even_rows import LentStatistics
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.stacked_linear import sum_type
from schedc_runtime.moe.step_plan import Held
from schedc_runtime.moe.traced_copies import CopySpan, joined
from schedc_runtime.ranks.exchange import Pending
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.collective_calls import Communicator


@dataclass(frozen=True)
class StepRows:
    """What a step counted, on its way to the host, and its microbatches."""

    rows: HostCopy
    microbatches: int


class StepLender(ABC):
    """Lends experts of one layer from this rank's point of view, step after step.

    `begin` and `leave` enclose a step. `commit` follows a step that has succeeded, and the next step follows its rows.
    """

    def __init__(self, experts: Experts, group: ExpertGroup) -> None:
        self.experts, self.group = experts, group
        self.after: StepLender | None = None
        """The lender of the next layer of the rank, whose weights travel beside this layer's work."""
        self.place = -1, -1
        """Stage, and number of the layer in it."""
        self._left_at = 0
        """When the exchanges that travel were started, in ns of `perf_counter_ns`."""
        self.held: Held = ()
        """[ranks] the copies of the step that runs; empty outside of steps, and where nothing is copied."""
        self.statistics = LentStatistics()
        self._before: LentStatistics | None = None
        """The counts before a step that has not succeeded yet."""
        self.next: Held | None = ((),) * group.size
        """The copies of the next step; None where `_rows` say them."""
        self._on = self._first = True  # a lower threshold holds before any step has succeeded
        self._rows: StepRows | None = None
        self._left: StepRows | None = None
        self._sum: Tensor | None = None
        self._microbatches = 0
        self._travelling: list[Pending] | None = None
        self._slots = LentRoom()

    @property
    def peers(self) -> Communicator:
        """The ranks among which experts are lent."""
        return self.group.expert

    @property
    def lane(self) -> Lane:
        """The links on which copies travel."""
        return Lane.NODE if self.peers.size <= self.group.per_node else Lane.RAIL

    @abstractmethod
    def planned(self, rows: Tensor, microbatches: int) -> Held:
        """The copies of the next step. rows: [numbers] what `counted` has summed over ``microbatches``, on the host."""

    @abstractmethod
    def refusal(self, held: Held) -> str:
        """Why ranks cannot have these copies; empty if they can."""

    @abstractmethod
    def fitted(self, held: Sequence[Any]) -> Held | None:
        """The copies ``held`` for this group, which may have other ranks; None where they say nothing of it."""

    @abstractmethod
    def lend(self, held: Held) -> int:
        """Number the copies of a step that has some. Returns the number of slots on this rank."""

    @abstractmethod
    def send(self) -> list[Pending]:
        """Start to fill the slots."""

    @abstractmethod
    def arrive(self, received: Any) -> None:
        """Put what an exchange of `send` has brought into the slots, unless it is there."""

    @abstractmethod
    def counted(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """([ranks, experts] rows by source rank and expert, what the next step follows), of counts [ranks, columns]."""

    @abstractmethod
    def send_back(self, gradients: Sequence[Tensor]) -> list[Pending]:
        """Start to return ``gradients`` [slots, ...] of each stack that is trained to their owners."""

    @abstractmethod
    def take_back(self, returned: Sequence[Any]) -> None:
        """Add what the exchanges of `send_back` have brought to the gradients of this rank's experts."""

    def choose(self) -> Held:
        """[ranks] the copies of the next step. Waits for the copy of the last step's rows."""
        if self.next is None:
            assert self._rows is not None
            rows, self._rows = self._rows, None
            self.next = self.planned(rows.rows.join(), rows.microbatches)
        return self.next

    def set_next(self, held: Held) -> None:
        """Copy ``held`` in the next step, as after a step whose rows have asked for it."""
        self.next, self._rows, self._first = held, None, False

    def begin(self) -> None:
        """Begin a step: its copies are fixed, and their slots are empty.

        What a step without success has counted is forgotten.
        """
        self.statistics = self._before or self.statistics
        self._before = replace(self.statistics)
        held = self.choose()
        self.leave()
        self._left = None
        if any(held):
            self.held = held
            self._slots.open(self.experts, self.lend(held))

    def start(self) -> None:
        """Start to fill the slots, unless that has begun."""
        if self.held and self._travelling is None:
            before = sum(self.group.expert.sent)
            self._left_at = perf_counter_ns()
            self._travelling = self.send()
            self.statistics.sent += sum(self.group.expert.sent) - before

    def borrowed(self) -> tuple[Tensor, ...]:
        """([slots, ...], [slots, ...]) the weights in this rank's slots; () if nothing is copied.

        The first call of a step waits for them, and starts those of the next layer.
        """
        self.start()
        arrive = bool(self._travelling)
        while self._travelling:
            pending = self._travelling.pop(0)
            self.arrive(pending.communicator.wait(pending.handle))
        if arrive:
            self.tell_joined(gradients=False)
        if self.after is not None:
            self.after.start()
        return self._slots.parameters if self.held else ()

    def count(self, table: Tensor) -> Tensor:
        """[ranks, experts] rows by source rank and expert, which are added to those of the step.

        table: [ranks, columns] the counts of a microbatch that is trained on, as numbered in this step.
        """
        rows, told = self.counted(table)
        self._sum = told.to(torch.int64) if self._sum is None else self._sum.add_(told)
        self._microbatches += 1
        return rows

    def give_back(self) -> list[Pending]:
        """Start to return the gradients of the slots; see `take_back`. Empty where there is nothing to return."""
        theirs = self._slots.sums()
        if not self.held or not theirs:
            return []
        before, self._left_at = sum(self.group.expert.sent), perf_counter_ns()
        pending = self.send_back(theirs)
        self.statistics.sent += sum(self.group.expert.sent) - before
        return pending

    def tell_joined(self, *, gradients: bool) -> None:
        """Tell those who trace the step that the exchanges of weights, or of ``gradients``, have been joined."""
        for tell in joined:
            tell(CopySpan(self.lane, gradients, *self.place, -1, self._left_at, perf_counter_ns()))

    def leave(self) -> None:
        """End a step, whether it has succeeded or not. The copy of its rows to the host begins."""
        self.held, self._travelling = (), None
        self._slots.close()
        rows, self._sum = self._sum, None
        microbatches, self._microbatches = self._microbatches, 0
        if rows is None:
            return
        self._left = StepRows(HostCopy(rows), microbatches)

    def commit(self) -> None:
        """Let the next step follow the rows of this one, which has succeeded."""
        self._before = None
        if self._left is not None:
            self._on = bool(self.next and any(self.next)) or self._first
            self._rows, self._left, self.next, self._first = self._left, None, None, False

    def clear_statistics(self) -> None:
        """Clear the counts."""
        self.statistics, self._before = LentStatistics(), None


class LentRoom:
    """Room for the weights of lent experts and for their gradients on one rank, kept between steps.

    weights, gradients: [lent, ...] of each stack; a gradient is None where the stack is not trained, and float32 at
    least. parameters: the weights as leaves of autograd, the same objects as long as as many experts are lent.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.parameters: tuple[nn.Parameter, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(tensor.nbytes for tensor in (*self.weights, *self.gradients) if tensor is not None)

    def open(self, experts: Experts, lent: int) -> None:
        """Make room for ``lent`` experts, with gradients of zero."""
        stacks = (experts.gate_up, experts.down)
        alike = [
            len(slot) == lent and slot.dtype == stack.dtype and slot.device == stack.device
            and slot.requires_grad == stack.requires_grad
            for slot, stack in zip(self.parameters, stacks, strict=False)
        ]  # fmt: skip
        if not alike or not all(alike):
            self.weights = [stack.detach().new_empty(lent, *stack.shape[1:]) for stack in stacks]
            self.gradients = [
                torch.empty_like(slot, dtype=sum_type(slot)) if stack.requires_grad else None
                for slot, stack in zip(self.weights, stacks, strict=True)
            ]
            self.parameters = tuple(
                nn.Parameter(slot, requires_grad=stack.requires_grad)
                for slot, stack in zip(self.weights, stacks, strict=True)
            )
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                if gradient is not None:
                    parameter.grad_dtype = gradient.dtype
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is not None:
                gradient.zero_()
                parameter.grad = gradient

    def sums(self) -> list[Tensor]:
        """[lent, ...] the gradients of each stack that is trained."""
        return [gradient for gradient in self.gradients if gradient is not None]

    def close(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
