"""Hot experts by microbatch: the most chosen experts, lent to all ranks, so that their rows stay on their ranks.

    everyone's routing --> choose_hot --> Lending --> copies --> [hot] --> slots beside the experts of each rank

The counts of rows decide which experts are hot. All ranks know them, so that nothing is negotiated. A rank with the
weights of a hot expert computes its own tokens itself. `copied` says how weights and gradients travel. If no expert is
hot, nothing is sent. `hot_slots` lends for a whole step instead.

Shadowed experts, chosen greedily from all-gathered counts: FasterMoE (He et al., 2022), section 4. Replicas of the most
visited experts by microbatch: Huawei's balanced MoE and MetaX's hot experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from schedc_runtime.moe.copied import CopiedExperts
from schedc_runtime.moe.hot_choice import HotPolicy, choose_hot


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
    def copies(self) -> CopiedExperts:
        """The copies of a microbatch: of each hot expert one on every other rank."""
        owned = [[expert - rank * self.local for expert in self.owned_by(rank)] for rank in range(self.ranks)]
        pairs = [[[] if taker == home else mine for taker in range(self.ranks)] for home, mine in enumerate(owned)]
        return CopiedExperts(self.rank, False, lambda: pairs)

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

    expert_bytes, gradient_bytes: bytes of an expert's weights, and of the gradients of a copy. chosen: number of times
    an expert was lent. kept: rows that stayed here. sent: bytes of weights and gradients that this rank sent.
    """

    policy: HotPolicy
    experts: int
    rank: int
    expert_bytes: int
    gradient_bytes: int
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
            self.sent += len(lending.places) * (ranks - 1) * self.expert_bytes + len(borrowed) * self.gradient_bytes
        return lending

    def end_step(self) -> None:
        """Clear the counts. `update_bias` calls this after every step."""
        self.on, self.wanted = self.wanted, False
        self.chosen = self.kept = self.sent = 0
