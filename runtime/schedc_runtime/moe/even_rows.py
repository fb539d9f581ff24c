"""Rows of experts made even among ranks by microbatch: copies of experts go where rows have room.

    everyone's routing --> plan_forest --> numbers of places --> counts, route
                                 |
                                 +--> copies --> [hot] --> slots beside the experts of each rank

A rank has a place for each expert of its own, and one for each copy. All copies of a rank belong to one other rank.
Choices are renumbered by the places where their rows are computed; sums of tokens follow homes. So outputs and all
gradients but those of expert weights have the bits of the run without copies, where products keep the bits of rows.

``in place`` computes the same pieces of rows at home, and sends nothing: the reference for bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from schedc.ir.balance import STEP_SLOTS
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.copied import CopiedExperts
from schedc_runtime.moe.counts import Choices, Counts
from schedc_runtime.moe.forest import Forest, computed_rows, plan_among


@dataclass(frozen=True)
class EvenRows:
    """How rows become even.

    within: most rows of a rank over the mean, by microbatch. in_place: copies stay at home. by_step: copies last for a
    step. slots: the most copies on a rank; None: as many as it needs, by step `STEP_SLOTS`. over_node: rows and copies
    stay in the node of their home; otherwise they move among all ranks of the group.
    """

    within: Fraction = Fraction("1.01")
    in_place: bool = False
    by_step: bool = False
    slots: int | None = None
    over_node: bool = False

    def __post_init__(self) -> None:
        if self.within < 1:
            raise RuntimeFault(f"rows within {float(self.within):g} of the mean", "1 is the mean: give 1 or more")
        if self.slots is not None and self.slots < 1:
            raise RuntimeFault(f"{self.slots} slots for copies", "give 1 or more, or None")

    @property
    def name(self) -> str:
        """As a plan writes it."""
        return f"balance by {'step' if self.by_step else 'microbatch'}"

    def slots_of(self, local: int) -> int:
        """The most copies on a rank with ``local`` experts of its own."""
        return min(local, self.slots or (STEP_SLOTS if self.by_step else local))


class RowPlaces(NamedTuple):
    """Numbers of the places where rows are computed: a rank's experts come first, its copies follow.

    wide: places of a rank. local: experts of a rank. numbers: [R, R, m] the place of each expert of a home by the rank
    that computes its rows; any where it has none. parent: [R] the home of the copies of each rank; itself in place.
    """

    wide: int
    local: int
    numbers: Tensor
    parent: Tensor

    @staticmethod
    def of_forest(forest: Forest, slots: int, in_place: bool, peers: int) -> RowPlaces:
        """The places of a microbatch with at most ``slots`` copies on a rank. In place a home has the copies of all its
        experts: a copy for each overlap of child ranks (at most ``peers``) and experts on a line."""
        local = forest.quota.shape[1]
        wide = local + (local + peers if in_place else slots)
        numbers = _numbers(forest.parent, forest.quota > 0, wide, in_place)
        rank = torch.arange(len(numbers), device=numbers.device)
        return RowPlaces(wide, local, numbers, rank if in_place else forest.parent)

    @property
    def total(self) -> int:
        """Places of all ranks."""
        return len(self.numbers) * self.wide

    @property
    def homes(self) -> Tensor:
        """[places + 1] the home of the expert at each place; R for none, the last."""
        ranks = len(self.parent)
        place = torch.arange(self.total, device=self.parent.device)
        rank = place.div(self.wide, rounding_mode="floor")
        at_home = place % self.wide < self.local
        return functional.pad(torch.where(at_home, rank, self.parent.index_select(0, rank)), (0, 1), value=ranks)

    def of_homes(self, choices: Tensor) -> Tensor:
        """[...] the places of experts [...] at home; what is no expert stays none."""
        return choices.div(self.local, rounding_mode="floor") * self.wide + choices % self.local

    def of_rows(self, choices: Tensor, rows: Tensor, rank: int, computed: Tensor) -> Tensor:
        """[N, k] the places of the choices [N, k] of ``rank``; a number behind the last expert is none.

        rows: [R, E] by source rank and expert. computed: [R, R, m] rows by computing rank, home and expert. The rows of
        an expert go to ranks in ascending order, by source rank and token.
        """
        experts, flat = rows.shape[1], choices.flatten().long()
        mine = rows[rank]
        first = computed.sum(0).flatten().cumsum(0) - rows[rank:].sum(0)  # of all rows, ordered by expert and source
        offsets = functional.pad(first - (mine.cumsum(0) - mine), (0, 1))
        sorted_choices, order = flat.sort(stable=True)
        number = torch.arange(len(flat), device=flat.device) + offsets.index_select(0, sorted_choices)
        line = computed.permute(1, 2, 0).flatten()  # home, expert, computing rank
        cell = torch.searchsorted(line.cumsum(0), number, right=True).clamp_(max=len(line) - 1)
        places = self.numbers.permute(1, 2, 0).flatten().index_select(0, cell)
        placed = torch.empty_like(flat).scatter_(0, order, places)
        return torch.where(flat == experts, self.total, placed).view(choices.shape)

    def counts(self, rows: Tensor, computed: Tensor) -> Tensor:
        """[R, places] rows by source rank and place, for arguments of `of_rows`."""
        ranks, experts = rows.shape
        parts = computed.reshape(ranks, experts)
        ends, sources = parts.cumsum(0), rows.cumsum(0).unsqueeze(1)
        low = torch.maximum(ends - parts, sources - rows.unsqueeze(1))
        overlap = (torch.minimum(ends, sources) - low).clamp_(min=0)  # source, computing rank, expert
        places = self.numbers.reshape(1, -1).expand(ranks, -1)
        return rows.new_zeros(ranks, self.total).scatter_add_(1, places, overlap.flatten(1))


def _numbers(parent: Tensor, copied: Tensor, wide: int, in_place: bool) -> Tensor:
    """[R, R, m] `RowPlaces.numbers`. copied: [R, m] the experts of a rank's parent of which it has copies."""
    ranks, local = copied.shape
    number = torch.arange(ranks, device=parent.device)
    home, rank = number[:, None], number[:, None, None]
    slot = copied.cumsum(1) - 1  # [taker, expert]
    if in_place:
        mine = (parent == home) * copied.sum(1)  # [home, taker]
        before = mine.cumsum(1).t() - mine.t()  # [taker, home]
        copies = home * wide + local + before.unsqueeze(2) + slot.unsqueeze(1)
    else:
        copies = (rank * wide + local + slot.unsqueeze(1)).expand(ranks, ranks, local)
    own = home * wide + torch.arange(local, device=number.device)
    return torch.where(rank == home, own, copies).clamp(min=0)


class Placed(NamedTuple):
    """A microbatch by the places where its rows are computed.

    choices: of this rank, in the order of homes, by which tokens' sums are formed. copies: of this microbatch; None
    where copies last for a step. homes: [places + 1] as of `RowPlaces`, for two hops. own: experts of a rank, behind
    which its copies of a step come; None without any.
    """

    choices: Choices
    counts: Counts
    copies: CopiedExperts | None = None
    homes: Tensor | None = None
    own: int | None = None


@dataclass
class LentStatistics:
    """Counts since `MoELayer.update_bias`. lent: times that an expert was lent. kept: rows of this rank in the
    slots. taken: rows of other ranks in the slots. left: rows for this rank that stayed at home without a slot.
    sent: bytes of weights and gradients that this rank sent. Rows are scalars of the device."""

    lent: int = 0
    kept: Tensor | int = 0
    taken: Tensor | int = 0
    left: Tensor | int = 0
    sent: int = 0

    def take(self, taken: Tensor, left: Tensor | None) -> None:
        """Count the rows of a microbatch. left: None where none stay at home."""
        self.taken = self.taken + taken
        if left is not None:
            self.left = self.left + left


class Evener:
    """Makes the rows of one layer even among ``peers`` neighbouring ranks."""

    def __init__(self, policy: EvenRows, peers: int) -> None:
        self.policy, self.peers = policy, peers
        self.statistics = LentStatistics()

    def plan(self, choices: Choices, counts: Counts) -> Placed:
        """Plan a microbatch from this rank's choices and everyone's counts."""
        shape, rows = counts.shape, counts.rows.long()
        of_homes = rows.sum(0).view(shape.ranks, shape.local)
        slots = self.policy.slots_of(shape.local)
        forest, left = plan_among(of_homes, self.policy.within, self.peers, slots)
        if torch.is_grad_enabled():
            self.statistics.take(forest.taken[shape.rank], None if left is None else left[shape.rank])
        places = RowPlaces.of_forest(forest, slots, self.policy.in_place, self.peers)
        placed = placed_rows(choices, counts, places, computed_rows(of_homes, forest))
        return placed._replace(copies=CopiedExperts.of_forest(forest, shape.rank, self.policy.in_place, self.peers))

    def clear_statistics(self) -> None:
        """Clear the counts."""
        self.statistics = LentStatistics()


def placed_rows(choices: Choices, counts: Counts, places: RowPlaces, computed: Tensor) -> Placed:
    """A microbatch by places. computed: [R, R, m] as of `RowPlaces.of_rows`.

    Numbers of rows by node stay right, since rows of two hops stay in the node of their home.
    """
    shape, rows = replace(counts.shape, experts=places.total), counts.rows.long()
    table = torch.cat([places.counts(rows, computed), counts.table[:, counts.shape.experts :]], 1)
    kind = torch.int16 if places.total < 2**15 - 1 else torch.int32
    placed = places.of_rows(choices.unsorted, rows, shape.rank, computed).to(kind)
    if shape.two_hops:
        ids, homes = placed.gather(1, choices.slots), places.homes
    else:
        ids, homes = places.of_homes(choices.ids.int()).to(kind), None
    return Placed(Choices(ids, choices.slots, placed), Counts(table.to(torch.int32), shape), homes=homes)
