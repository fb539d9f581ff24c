"""Hot experts by step: a slot on every rank for each of them, filled once and emptied once, for all microbatches.

    rows of the last step --> choose_for_step --> Lending --> [broadcast] --> slots --F, I, W of all microbatches-->
    the owner's gradient <-- [reduce], in ascending order of ranks <-- gradients of the slots, in float32 at least

All microbatches have the same hot experts. A rank therefore counts its choices with its slots as experts of its own: no
further exchange tells of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.device.choice import brought
from schedc_runtime.moe.copied import add_returned, trained
from schedc_runtime.moe.counts import Shape
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.hot import NOTHING_HOT, Lending
from schedc_runtime.moe.hot_choice import HotPolicy, choose_for_step
from schedc_runtime.moe.stacked_linear import sum_type
from schedc_runtime.moe.step_lender import StepLender
from schedc_runtime.moe.step_plan import Held
from schedc_runtime.ranks.exchange import Pending
from schedc_runtime.ranks.expert_group import ExpertGroup


@dataclass(frozen=True)
class LentNumbers:
    """How a rank's choices are numbered while experts are lent, as tensors on the device.

    placed: [experts] the number of each expert for this rank: a borrowed expert has an own slot. columns:
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


class HotLender(StepLender):
    """Lends the hot experts of one layer to all ranks."""

    def __init__(self, policy: HotPolicy, experts: Experts, group: ExpertGroup) -> None:
        super().__init__(experts, group)
        self.policy = policy
        self.lending: Lending = NOTHING_HOT
        self.numbering: LentNumbers | None = None
        self._numbered: Lending = NOTHING_HOT
        self._returned: Sequence[Tensor] = ()
        """[own hot, ...] the sums of gradients that come back, for each parameter that is trained."""

    def chosen(self) -> tuple[int, ...]:
        """The experts that are hot in the next step, ascending. Waits as `choose` does."""
        return _hot(self.choose())

    def held_by(self, hot: Sequence[int]) -> Held:
        """[ranks] the copies while ``hot`` experts are lent."""
        lending = self._lending(hot)
        return tuple(map(lending.lent_to, range(self.group.size)))

    def planned(self, rows: Tensor, microbatches: int) -> Held:  # [numbers] as of `counted`
        return self.held_by(choose_for_step(rows, self.policy, microbatches, self._on))

    def refusal(self, held: Held) -> str:
        hot, total, most = _hot(held), self.experts.total, self.policy.most
        assert most is not None
        if not all(0 <= expert < total for expert in hot) or len(hot) > most:
            return f"{list(hot)}, of {total} experts and {most} slots"
        if held != self.held_by(hot):
            return f"copies {[list(each) for each in held]}, and {list(hot)} would be hot on all ranks"
        return ""

    def fitted(self, held: Sequence[Any]) -> Held | None:
        lists = [held] if held and isinstance(held[0], int) else held  # runs of earlier versions kept one list
        return self.held_by(_hot(lists))

    def lend(self, held: Held) -> int:
        lending = self._lending(_hot(held))
        if self._numbered != lending:
            self._numbered = lending
            self.numbering = LentNumbers.of(lending, self.experts.total, self.experts.down.device)
        self.lending = lending
        self.statistics.lent += len(lending.hot)
        return len(lending.lent_to(self.group.rank))

    def leave(self) -> None:
        super().leave()
        self.lending, self._returned = NOTHING_HOT, ()

    def send(self) -> list[Pending]:
        members = self.group.expert
        return [
            Pending(members, members.broadcast(tensor, owner, "hot"))
            for owner in range(members.size)
            for tensor in self._of_owner(owner, [self.experts.gate_up, self.experts.down], self._slots.weights)
        ]

    def arrive(self, received: Any) -> None:
        pass  # a broadcast fills the slot

    def widened(self, shape: Shape) -> Shape:
        """The sizes of a microbatch with the slots of all ranks."""
        return replace(shape, experts=shape.experts + shape.ranks * len(self.lending.hot))

    def counted(self, table: Tensor) -> tuple[Tensor, Tensor]:
        total, ranks = self.experts.total, self.group.size
        rows = table[:, : total + ranks * len(self.lending.hot)]
        if self.lending.hot:
            assert self.numbering is not None
            self.statistics.kept = self.statistics.kept + self.numbering.kept(rows, self.group.rank)
            rows = self.numbering.rows(rows)
        return rows, rows

    def send_back(self, gradients: Sequence[Tensor]) -> list[Pending]:
        members = self.group.expert
        self._returned = [
            torch.empty(
                len(self.lending.places), *parameter.shape[1:], dtype=sum_type(parameter), device=parameter.device
            )
            for parameter in trained(self.experts)
        ]
        return [
            Pending(members, members.reduce(tensor, owner, "hot backward"))
            for owner in range(members.size)
            for tensor in self._of_owner(owner, self._returned, gradients, whole=True)
        ]

    def take_back(self, returned: Sequence[Any]) -> None:
        """Add the sums to the gradients of this rank's hot experts: those of its slots, in ascending order of ranks."""
        add_returned(trained(self.experts), self.lending.places, self._returned)
        self._returned = ()

    def _lending(self, hot: Sequence[int]) -> Lending:
        return Lending(tuple(hot), self.group.size, self.group.rank, self.experts.total // self.group.size)

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


def _hot(held: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The experts of which any rank has a copy, ascending."""
    return tuple(sorted({expert for experts in held for expert in experts}))


def _part(stack: Tensor, places: Sequence[int]) -> Tensor:
    """[places, ...] some experts of a stack [E, ...]: contiguous, and copied once at most."""
    if places[-1] - places[0] + 1 == len(places):
        return stack[places[0] : places[-1] + 1].contiguous()
    return torch.stack([stack[place] for place in places])
