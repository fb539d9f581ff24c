"""Rows of experts made even by copies for a step: each microbatch divides its rows anew among homes and copies.

    rows of the last step --> plan_step --> slots of each rank <-- weights of its parent's experts
    counts of a microbatch --> StepQuotas --> places of rows: at home, or in the slot of a rank below

Weights and gradients travel from rank to rank in one exchange each. In place copies stay at home: the same pieces of
rows, computed there, are the reference for bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.device.choice import brought
from schedc_runtime.moe.copied import CopiedExperts, CopyExchange, add_returned, trained
from schedc_runtime.moe.counts import Choices, Counts
from schedc_runtime.moe.even_rows import EvenRows, Placed, RowPlaces, placed_rows
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.forest import computed_rows
from schedc_runtime.moe.step_lender import StepLender
from schedc_runtime.moe.step_plan import Held, StepQuotas, plan_step_among
from schedc_runtime.ranks.exchange import Pending
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.collective_calls import Communicator


class EvenLender(StepLender):
    """Lends experts of one layer from rank to rank, and places the rows of microbatches."""

    def __init__(self, policy: EvenRows, experts: Experts, group: ExpertGroup) -> None:
        super().__init__(experts, group)
        self.policy, self.local = policy, len(experts.down)
        self.exchange = CopyExchange(experts, policy.over_node)
        self.exchange.group = group
        self.copies = CopiedExperts(self.peers.rank, policy.in_place, lambda: ())
        self._numbered: Held = ()

    @property
    def peers(self) -> Communicator:
        """The ranks among which experts are lent."""
        return self.exchange.peers

    def planned(self, rows: Tensor, microbatches: int) -> Held:  # [numbers] as of `counted`
        told, experts = rows.tolist(), self.experts.total
        slots = self.policy.slots_of(self.local)
        return plan_step_among(told[:experts], told[experts:], microbatches, slots, self.peers.size)

    def refusal(self, held: Held) -> str:
        ranks, slots = self.group.size, self.policy.slots_of(self.local)
        parents = [{expert // self.local for expert in experts} for experts in held]
        if len(held) != ranks:
            return f"copies of {len(held)} ranks, of {ranks}"
        for rank, (experts, homes) in enumerate(zip(held, parents, strict=True)):
            if len(set(experts)) != len(experts) or len(experts) > slots:
                return f"copies {list(experts)} of rank {rank}, which has {slots} slots"
            if len(homes) > 1 or rank in homes or not homes <= set(range(ranks)):
                return f"copies {list(experts)} of rank {rank}, of {self.experts.total} experts, {self.local} on a rank"
            if any(home // self.peers.size != rank // self.peers.size for home in homes):
                return f"copies {list(experts)} of rank {rank}, whose home is in another node"
        return "ranks that borrow in a circle" if _circle(parents) else ""

    def fitted(self, held: Sequence[Any]) -> Held | None:
        if len(held) != self.group.size or not all(isinstance(each, list | tuple) for each in held):
            return None
        homes = [{expert // self.local for expert in experts} for experts in held]
        return tuple(map(tuple, held)) if all(len(each) <= 1 for each in homes) else None

    def lend(self, held: Held) -> int:
        if held != self._numbered:
            self._numbered = held
            self._number(held)
        self.statistics.lent += sum(map(len, held))
        return self.copies.slots

    def _number(self, held: Held) -> None:
        ranks, local, where = self.group.size, self.local, self.experts.down.device
        pairs: list[list[list[int]]] = [[[] for _ in held] for _ in held]
        for rank, borrowed in enumerate(held):
            for expert in borrowed:
                pairs[expert // local][rank].append(expert % local)
        first = self.group.rank - self.peers.rank
        near = slice(first, first + self.peers.size)
        self.copies = CopiedExperts(
            self.peers.rank, self.policy.in_place, lambda: [takers[near] for takers in pairs[near]]
        )
        self.quotas = StepQuotas.of(held, local, where, self.peers.size)
        most = [sum(map(len, takers)) for takers in pairs] if self.policy.in_place else map(len, held)
        wide = local + max(most)
        numbers = [home * wide + expert for home in range(ranks) for expert in range(local)] * ranks
        for home, takers in enumerate(pairs):
            behind = 0
            for rank, experts in enumerate(takers):
                first = home * wide + local + behind if self.policy.in_place else rank * wide + local
                for slot, expert in enumerate(experts):
                    numbers[(rank * ranks + home) * local + expert] = first + slot
                behind += len(experts)
        parent = torch.arange(ranks, device=where) if self.policy.in_place else self.quotas.parent
        self.places = RowPlaces(wide, local, brought(numbers, where).view(ranks, ranks, local), parent)

    def plan(self, choices: Choices, counts: Counts) -> Placed:
        """Plan a microbatch, as of `Evener.plan`."""
        if not self.held:
            return Placed(choices, counts)
        shape = counts.shape
        rows = counts.rows.sum(0, dtype=torch.int64).view(shape.ranks, shape.local)
        forest, left = self.quotas.divide(rows)
        if torch.is_grad_enabled():
            self.statistics.take(forest.taken[shape.rank], left[shape.rank])
        placed = placed_rows(choices, counts, self.places, computed_rows(rows, forest))
        return placed._replace(own=self.local)

    def counted(self, table: Tensor) -> tuple[Tensor, Tensor]:
        rows = table[:, : self.experts.total]
        by_expert = rows.sum(0, dtype=torch.int64)
        return rows, torch.cat((by_expert, by_expert.view(self.group.size, -1).sum(1).square()))

    def send(self) -> list[Pending]:
        return [self.exchange.start(self)]

    def arrive(self, received: Any) -> None:
        for slot, weights in zip(self._slots.weights, received, strict=True):
            slot.copy_(weights)

    def send_back(self, gradients: Sequence[Tensor]) -> list[Pending]:
        return [self.exchange.send_back(self.copies, gradients)]

    def take_back(self, returned: Sequence[Any]) -> None:
        """Add what copies have summed over microbatches to the gradients of their homes, by ascending ranks."""
        for gradients in returned:
            add_returned(trained(self.experts), self.copies.places, gradients)


def _circle(parents: Sequence[set[int]]) -> bool:
    """Whether ranks under ``parents`` [ranks] borrow in a circle."""
    left = {rank: next(iter(homes)) for rank, homes in enumerate(parents) if homes}
    while roots := [rank for rank, home in left.items() if home not in left]:
        for rank in roots:
            del left[rank]
    return bool(left)
