"""Hot experts by step: a slot on every rank for each of them, filled once and emptied once, for all microbatches.

    rows of the last step --> choose_for_step --> Lending --> [broadcast] --> slots --F, I, W of all microbatches-->
    the owner's gradient <-- [reduce], in ascending order of ranks <-- gradients of the slots, in float32 at least

The rows of a step are summed on the device. Their copy to the host is complete when the next step begins, so that
nothing waits for it. All microbatches have the same hot experts. A rank therefore counts its choices with its slots as
experts of its own: no further exchange tells of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from schedc_runtime.device.choice import HostCopy, brought
from schedc_runtime.moe.counts import Shape
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.hot import NOTHING_HOT, Lending
from schedc_runtime.moe.hot_choice import HotPolicy, choose_for_step
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.base import Handle


@dataclass(frozen=True)
class LentNumbers:
    """How a rank's choices are numbered while experts are lent, as tensors on the device.

    placed: [experts] the number of each expert for this rank: a slot of its own for one that it borrows. columns:
    [experts] the number of each expert on its owner. hot: [hot] the experts. slots: [ranks, hot] the number of each in
    the slots of each rank; for the owner one that nobody has.
    """

    placed: Tensor
    columns: Tensor
    hot: Tensor
    slots: Tensor

    @staticmethod
    def of(lending: Lending, experts: int, device: torch.device) -> LentNumbers:
        """The numbers of all ``experts``. They are brought to the device in one copy, which the host does not await."""
        local, wide = lending.local, lending.local + len(lending.hot)
        columns = [expert // local * wide + expert % local for expert in range(experts)]
        placed, lent = list(columns), lending.lent_to(lending.rank)
        for slot, expert in enumerate(lent):
            placed[expert] = lending.rank * wide + local + slot
        slots = []
        for rank in range(lending.ranks):
            of_rank = {expert: slot for slot, expert in enumerate(lending.lent_to(rank))}
            slots += [rank * wide + local + of_rank.get(expert, len(lending.hot) - 1) for expert in lending.hot]
        sizes = [experts, experts, len(lending.hot), len(slots)]
        numbers = brought([*placed, *columns, *lending.hot, *slots], device)
        own, everyones, hot, lent_to = torch.split(numbers, sizes)
        return LentNumbers(own, everyones, hot, lent_to.view(lending.ranks, -1))

    def place(self, index: Tensor) -> Tensor:
        """[N, k] choices of experts as they are numbered here. What is no expert stays none."""
        experts = len(self.placed)
        numbers = self.placed.index_select(0, index.clamp(0, experts - 1).reshape(-1)).view(index.shape)
        none = torch.where(index < 0, index, self.slots.numel() + experts)
        return torch.where((index >= 0) & (index < experts), numbers, none)

    def rows(self, counted: Tensor) -> Tensor:
        """[ranks, experts] rows by source rank and expert, wherever they are computed. counted: [ranks, numbers]."""
        kept = counted.gather(1, self.slots)
        return counted.index_select(1, self.columns).index_add_(1, self.hot, kept)

    def kept(self, counted: Tensor, rank: int) -> Tensor:
        """Scalar: rows of ``rank`` that stay there. counted: [ranks, numbers] rows by source rank."""
        return counted[rank].index_select(0, self.slots[rank]).sum()


@dataclass
class LentStatistics:
    """Counts since `MoELayer.update_bias`. lent: times that an expert was lent. kept: rows that stayed on this rank, a
    scalar of the device. sent: bytes of weights and gradients that this rank sent."""

    lent: int = 0
    kept: Tensor | int = 0
    sent: int = 0


@dataclass(frozen=True)
class StepRows:
    """The rows [ranks, experts] of a step on their way to the host, and its microbatches."""

    rows: HostCopy
    microbatches: int


class StepLender:
    """Lends the hot experts of one layer from this rank's point of view, step after step.

    `begin` and `leave` enclose a step. `commit` says that it has succeeded: the next one follows its rows.
    """

    def __init__(self, policy: HotPolicy, experts: Experts, group: ExpertGroup) -> None:
        self.policy, self.experts, self.group = policy, experts, group
        self.lending: Lending = NOTHING_HOT
        self.numbering: LentNumbers | None = None
        self._numbered: Lending = NOTHING_HOT
        self.after: StepLender | None = None
        """The lender of the next layer of the rank, whose weights travel beside this layer's work."""
        self.statistics = LentStatistics()
        self.next: tuple[int, ...] | None = ()
        """The experts that are hot in the next step; None where `_rows` say it."""
        self._on = self._first = True  # the lower threshold holds before any step has succeeded
        self._rows: StepRows | None = None
        self._left: StepRows | None = None
        self._sum: Tensor | None = None
        self._microbatches = 0
        self._travelling: list[Handle] | None = None
        self._slots = LentRoom()
        self._returned: Sequence[Tensor] = ()
        """[own hot, ...] the sums of gradients that come back, for each parameter that is trained."""

    def choose(self) -> tuple[int, ...]:
        """The experts that are hot in the next step, ascending. Waits for the copy of the last step's rows."""
        if self.next is None:
            assert self._rows is not None
            rows, self._rows = self._rows, None
            self.next = choose_for_step(rows.rows.join(), self.policy, rows.microbatches, self._on)
        return self.next

    def set_next(self, hot: Sequence[int]) -> None:
        """Lend ``hot`` in the next step, as after a step in which they were found hot."""
        self.next, self._rows, self._first = tuple(sorted(hot)), None, False

    def begin(self) -> None:
        """Begin a step: its hot experts are fixed, and their slots are empty."""
        hot, group, total = self.choose(), self.group, self.experts.total
        self.leave()
        self._left = None
        if hot:
            lending = Lending(hot, group.size, group.rank, total // group.size)
            if self._numbered != lending:
                self.numbering, self._numbered = LentNumbers.of(lending, total, self.experts.down.device), lending
            self.lending = lending
            self._slots.open(self.experts, len(lending.lent_to(group.rank)))
            self.statistics.lent += len(hot)

    def start(self) -> None:
        """Start to fill the slots, unless that has begun."""
        if self.lending.hot and self._travelling is None:
            members, before = self.group.expert, sum(self.group.expert.sent)
            self._travelling = [
                members.broadcast(tensor, owner, "hot")
                for owner in range(members.size)
                for tensor in self._of_owner(owner, [self.experts.gate_up, self.experts.down], self._slots.weights)
            ]
            self.statistics.sent += sum(members.sent) - before

    def borrowed(self) -> tuple[Tensor, ...]:
        """([lent, ...], [lent, ...]) the weights in this rank's slots; () if no expert is hot.

        The first call of a step waits for them, and starts those of the next layer.
        """
        self.start()
        while self._travelling:
            self.group.expert.wait(self._travelling.pop(0))
        if self.after is not None:
            self.after.start()
        return self._slots.parameters if self.lending.hot else ()

    def widened(self, shape: Shape) -> Shape:
        """The sizes of a microbatch with the slots of all ranks."""
        return replace(shape, experts=shape.experts + shape.ranks * len(self.lending.hot))

    def count(self, table: Tensor) -> Tensor:
        """[ranks, experts] rows by source rank and expert. They and the rows that stayed here are added to the step's.

        table: [ranks, columns] the counts of a microbatch that is trained on, as numbered in this step.
        """
        total, ranks = self.experts.total, self.group.size
        rows = table[:, : total + ranks * len(self.lending.hot)]
        if self.lending.hot:
            assert self.numbering is not None
            self.statistics.kept = self.statistics.kept + self.numbering.kept(rows, self.group.rank)
            rows = self.numbering.rows(rows)
        self._sum = rows.to(torch.int64) if self._sum is None else self._sum.add_(rows)
        self._microbatches += 1
        return rows

    def give_back(self) -> list[Handle]:
        """Start to sum the gradients of the slots, of all ranks in ascending order, for their owners.

        Each handle's result is a gradient [own hot, ...] on the owner; see `take_back`.
        """
        theirs = self._slots.sums()
        if not self.lending.hot or not theirs:
            return []
        members, before = self.group.expert, sum(self.group.expert.sent)
        mine = [parameter for parameter in (self.experts.gate_up, self.experts.down) if parameter.requires_grad]
        self._returned = [
            torch.empty(len(self.lending.places), *parameter.shape[1:], dtype=_wide(parameter), device=parameter.device)
            for parameter in mine
        ]
        handles = [
            members.reduce(tensor, owner, "hot backward")
            for owner in range(members.size)
            for tensor in self._of_owner(owner, self._returned, theirs, whole=True)
        ]
        self.statistics.sent += sum(members.sent) - before
        return handles

    def take_back(self) -> None:
        """Add what `give_back` has summed to the gradients of this rank's hot experts. The slots are then empty."""
        if places := self.lending.places:
            index = brought(list(places), self.experts.down.device)
            mine = [parameter for parameter in (self.experts.gate_up, self.experts.down) if parameter.requires_grad]
            for parameter, returned in zip(mine, self._returned, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.index_add_(0, index, returned.to(parameter.grad.dtype))
        self._returned = []

    def leave(self) -> None:
        """End a step, whether it has succeeded or not. The copy of its rows to the host begins."""
        self.lending, self._travelling, self._returned = NOTHING_HOT, None, ()
        self._slots.close()
        rows, self._sum = self._sum, None
        microbatches, self._microbatches = self._microbatches, 0
        if rows is None:
            return
        self._left = StepRows(HostCopy(rows), microbatches)

    def commit(self) -> None:
        """The step has succeeded: the next one follows its rows."""
        if self._left is not None:
            self._on = bool(self.next) or self._first
            self._rows, self._left, self.next, self._first = self._left, None, None, False

    def clear_statistics(self) -> None:
        """Clear the counts."""
        self.statistics = LentStatistics()

    def _of_owner(self, owner: int, own: Sequence[Tensor], lent: Sequence[Tensor], whole: bool = False) -> list[Tensor]:
        """[2] the part of an owner's hot experts: on the owner of ``own``, elsewhere of this rank's slots ``lent``.

        whole: ``own`` has the owner's hot experts alone.
        """
        hot = self.lending.owned_by(owner)
        if not hot:
            return []
        if owner == self.group.rank:
            return list(own) if whole else [_part(tensor.detach(), self.lending.places) for tensor in own]
        first = self.lending.lent_to(self.group.rank).index(hot[0])
        return [tensor[first : first + len(hot)] for tensor in lent]


class LentRoom:
    """Room for the weights of lent experts and for their gradients on one rank, kept between steps.

    weights, gradients: [lent, ...] of each stack; a gradient is None where the stack is not trained. parameters: the
    weights as leaves of autograd, which are the same objects as long as as many experts are lent.
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
                torch.empty_like(slot, dtype=_wide(slot)) if stack.requires_grad else None
                for slot, stack in zip(self.weights, stacks, strict=True)
            ]
            self.parameters = tuple(
                nn.Parameter(slot, requires_grad=stack.requires_grad)
                for slot, stack in zip(self.weights, stacks, strict=True)
            )
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                if gradient is not None and gradient.dtype != parameter.dtype:
                    parameter.register_post_accumulate_grad_hook(_Widened(gradient))  # type: ignore[no-untyped-call]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is not None:
                gradient.zero_()
                parameter.grad = gradient if gradient.dtype == parameter.dtype else None

    def sums(self) -> list[Tensor]:
        """[lent, ...] the gradients of each stack that is trained."""
        return [
            gradient if parameter.grad is None else parameter.grad
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True)
            if gradient is not None
        ]

    def close(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


@dataclass(frozen=True, eq=False)
class _Widened:
    """A hook that adds a slot's gradient to ``total`` [lent, ...] in a wider type."""

    total: Tensor

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.total.add_(parameter.grad)
        parameter.grad = None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _part(stack: Tensor, places: Sequence[int]) -> Tensor:
    """[places, ...] some experts of a stack [E, ...]: contiguous, and copied once at most."""
    if places[-1] - places[0] + 1 == len(places):
        return stack[places[0] : places[-1] + 1].contiguous()
    return torch.stack([stack[place] for place in places])
