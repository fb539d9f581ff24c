"""Hot experts by microbatch: the most chosen experts, lent to all ranks, so that their rows stay on their ranks.

    everyone's routing --> choose_hot --> Lending --> lend --> [hot] --> slots beside the experts of each rank
                                                      ^                    |
                     the owner's gradient is added to |_______ [hot] ______| gradients of the slots

The counts of rows decide which experts are hot. All ranks know them, so that nothing is negotiated. A rank with the
weights of a hot expert computes its own tokens itself. The gradients of its slots go back, and the owner adds them in
ascending order of ranks. If no expert is hot, nothing is sent. `hot_slots` lends for a whole step instead.

Shadowed experts, chosen greedily from all-gathered counts: FasterMoE (He et al., 2022), section 4. Replicas of the most
visited experts by microbatch: Huawei's balanced MoE and MetaX's hot experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from schedc_runtime.device.choice import brought
from schedc_runtime.moe.hot_choice import HotPolicy, choose_hot
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.stage.recipes import RECIPES, Gradients, Recipe, Saved, Slots, refuse_twice
from schedc_runtime.transport.collective_calls import ordered_sum
from schedc_runtime.transport.collectives import SoloCommunicator


@dataclass(frozen=True)
class Lending:
    """The hot experts of a microbatch, as seen by ``rank`` of ``ranks`` with ``local`` experts each.

    hot: ascending. The slots of this rank hold the hot experts of the other ranks, in their order.
    """

    hot: tuple[int, ...] = ()
    ranks: int = 1
    rank: int = 0
    local: int = 0

    def owned_by(self, rank: int) -> tuple[int, ...]:
        return tuple(expert for expert in self.hot if expert // self.local == rank)

    def lent_to(self, rank: int) -> tuple[int, ...]:
        """The hot experts in the slots of a rank."""
        return tuple(expert for expert in self.hot if expert // self.local != rank)

    @property
    def places(self) -> list[int]:
        """Indices of this rank's hot experts among its own."""
        return [expert - self.rank * self.local for expert in self.owned_by(self.rank)]

    @property
    def splits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """([ranks], [ranks]) number of experts that this rank sends to each rank, and gets from each."""
        others = [rank != self.rank for rank in range(self.ranks)]
        mine = len(self.owned_by(self.rank))
        return (
            tuple(mine * other for other in others),
            tuple(len(self.owned_by(rank)) * other for rank, other in enumerate(others)),
        )

    def placed(self, routing: Tensor) -> Tensor:
        """[ranks, N, k] choices renumbered as if every rank owned the experts in its slots, after its own experts.

        Every rank then has ``local`` + len(``hot``) experts. Negative entries stay.
        """
        wide = self.local + len(self.hot)
        rank = torch.arange(self.ranks, device=routing.device)[:, None, None]
        chosen = routing.int()
        numbered = chosen.div(self.local, rounding_mode="floor") * wide + chosen % self.local
        slot = torch.zeros_like(rank)
        for expert in self.hot:
            borrows = rank != expert // self.local
            lent = (rank * wide + self.local + slot).to(numbered.dtype)
            numbered = torch.where((chosen == expert) & borrows, lent, numbered)
            slot = slot + borrows
        return torch.where(chosen < 0, chosen, numbered)


NOTHING_HOT = Lending()


@dataclass
class HotChooser:
    """Chooses the hot experts of one layer, microbatch after microbatch, and counts what that moved.

    The threshold depends on earlier steps and not on the microbatches of this step. The choice is therefore the same
    whatever the order of the microbatches, also if a microbatch is routed twice.

    expert_bytes: bytes of an expert's weights. chosen: number of times an expert was lent. kept: rows that stayed on
    this rank. sent: bytes of weights and gradients that this rank sent.
    """

    policy: HotPolicy
    experts: int
    rank: int
    expert_bytes: int
    on: bool = True
    wanted: bool = False
    """Whether the threshold was reached in this step."""
    chosen: int = 0
    kept: int = 0
    sent: int = 0

    def choose(self, counts: Tensor, count: bool) -> Lending:
        """The lending of a microbatch with ``counts`` [ranks, experts] on the host.

        count: whether the microbatch is trained on.
        """
        ranks = len(counts)
        hot = choose_hot(counts, self.policy, self.on)
        lending = Lending(hot, ranks, self.rank, self.experts // ranks)
        if count:
            borrowed = lending.lent_to(self.rank)
            self.wanted |= bool(hot)
            self.chosen += len(hot)
            self.kept += int(counts[self.rank, list(borrowed)].sum())
            self.sent += (len(lending.places) * (ranks - 1) + len(borrowed)) * self.expert_bytes
        return lending

    def end_step(self) -> None:
        """Clear the counts. `update_bias` calls this after every step."""
        self.on, self.wanted = self.wanted, False
        self.chosen = self.kept = self.sent = 0


class Lends(Protocol):
    """The part of a `Route` that lending uses."""

    @property
    def lending(self) -> Lending: ...

    @property
    def copies(self) -> HasPlaces | None: ...


class HotExchange(Exchange):
    """Sends the weights of hot experts, [own hot, ...], from their owner to the slots of all other ranks, [lent, ...].

    The backward sends the slots' gradients to the owner, which adds them in ascending order of ranks. Without a hot
    expert nothing is sent, as all ranks know.
    """

    label, differentiable = "hot", True

    def __init__(self) -> None:
        super().__init__()
        self.nobody = SoloCommunicator("hot")

    def start(self, route: Lends, *payload: Tensor) -> Pending:
        copies = [tensor.repeat(self.group.size - 1, *[1] * (tensor.dim() - 1)) for tensor in payload]
        return self._start(route.lending, copies, self.label)

    def start_backward(self, route: Lends, *gradients: Tensor) -> Pending:
        return self._start(route.lending, gradients, f"{self.label} backward", reverse=True)

    def finish_backward(self, pending: Pending) -> tuple[Tensor, ...]:
        others = self.group.size - 1
        return tuple(_added(part.view(others, len(part) // others, *part.shape[1:])) for part in self.finish(pending))

    def _start(self, lending: Lending, tensors: Sequence[Tensor], label: str, reverse: bool = False) -> Pending:
        if not lending.hot:
            return Pending(self.nobody, self.nobody.all_to_all(tensors, [0], [0], label))
        send, receive = lending.splits[::-1] if reverse else lending.splits
        group = self.group.expert
        return Pending(group, group.all_to_all(tensors, send, receive, label))


def _added(parts: Tensor) -> Tensor:
    """[ranks, ...] summed to [...] in ascending order of ranks; narrow types in float32."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    return ordered_sum(parts.to(wide)).to(parts.dtype)


class Lend(nn.Module):
    """Takes the weights of this rank's lent experts out of the stacks: [E, ...] to [lent, ...] each.

    W adds their gradients to the owner's own. An expert that is lent several times adds them in the order of `places`.
    """

    def forward(self, route: Lends, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        lending = route.lending if route.copies is None else route.copies
        return lend(lending, gate_up), lend(lending, down)


class HasPlaces(Protocol):
    """What is lent by a rank. places: [lent] numbers of its experts."""

    @property
    def places(self) -> list[int]: ...


def lend(lending: HasPlaces, weight: Tensor) -> Tensor:
    """[lent, ...] the lent weights of a stack [E, ...]."""
    output: Tensor = _Lent.apply(weight, tuple(lending.places))  # type: ignore[no-untyped-call]
    return output


class _Lent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, places: tuple[int, ...]) -> Tensor:
        ctx.shape, ctx.places = weight.shape, places
        return weight.index_select(0, _index(places, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_twice(ctx)
        return _whole(grad, (ctx.shape, ctx.places)), None


def _whole(grad: Tensor, facts: tuple[torch.Size, tuple[int, ...]]) -> Tensor:
    """[E, ...] the gradient of a stack whose experts at the places of ``facts`` get ``grad`` [lent, ...]."""
    shape, places = facts
    return add_in_turns(grad.new_zeros(shape), grad, places)


def add_in_turns(total: Tensor, grad: Tensor, places: Sequence[int]) -> Tensor:
    """[E, ...] ``total`` with ``grad`` [lent, ...] added at ``places``: of one place in their order, on all devices."""
    seen: Counter[int] = Counter()
    turns: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        turns.setdefault(seen[place], []).append(number)
        seen[place] += 1
    for turn in turns.values():
        part = grad if len(turns) == 1 else grad.index_select(0, _index(turn, grad))
        total.index_add_(0, _index([places[number] for number in turn], grad), part)
    return total


def _whole_gradient(slots: Slots, grad: Tensor, saved: Saved, facts: Any) -> Gradients:
    return (_whole(grad, facts) if facts[1] else None,)


def _add_returned(parameter: Tensor, grad: Tensor, facts: tuple[torch.Size, tuple[int, ...]]) -> None:
    """Add gradients [lent, ...] that came back for some experts, without a gradient of the whole stack."""
    assert parameter.grad is not None
    add_in_turns(parameter.grad, grad, facts[1])


def _lent_facts(node: Any, slots: Slots) -> tuple[torch.Size, tuple[int, ...]]:
    return node.shape, node.places


RECIPES["_LentBackward"] = Recipe({0: ()}, _whole_gradient, _lent_facts, add=_add_returned)


def _index(places: Sequence[int], like: Tensor) -> Tensor:
    return brought(list(places), like.device)
