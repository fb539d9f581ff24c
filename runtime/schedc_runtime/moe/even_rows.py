"""Rows of experts made even among ranks by microbatch: copies of experts go where rows have room.

    everyone's routing --> plan_forest --> numbers of places --> counts, route
                                 |
                                 +--> lend --> [hot] --> slots beside the experts of each rank
                                        ^                    |
          the owner's gradient, with its children's, ascending | gradients of the slots

A rank has a place for each expert of its own, and one for each copy. All copies of a rank belong to one other rank.
Choices are renumbered by the places where their rows are computed; sums of tokens follow homes. So outputs and all
gradients but those of expert weights have the bits of the run without copies, where products keep the bits of rows.

``in place`` computes the same pieces of rows at home, and sends nothing: the reference for bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from schedc_runtime.device.choice import HostCopy
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import Choices, Counts, Shape, ascending, counts_of_experts
from schedc_runtime.moe.forest import Forest, computed_rows, plan_forest
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.transport.collectives import SoloCommunicator


@dataclass(frozen=True)
class EvenRows:
    """How even rows become by microbatch. within: most rows of a rank over the mean. in_place: copies stay at home."""

    within: Fraction = Fraction("1.01")
    in_place: bool = False

    def __post_init__(self) -> None:
        if self.within < 1:
            raise RuntimeFault(f"rows within {float(self.within):g} of the mean", "1 is the mean: give 1 or more")


class CopiedExperts:
    """The copies of experts of one microbatch, as ``rank`` sees them. The host waits for them where weights travel."""

    def __init__(self, forest: Forest, rank: int, in_place: bool) -> None:
        self.rank, self.in_place = rank, in_place
        self._copy = HostCopy(torch.cat([forest.parent.unsqueeze(1), forest.quota], 1))

    @cached_property
    def pairs(self) -> list[list[list[int]]]:
        """[homes, ranks] numbers of a home's experts, ascending, of which a rank holds copies. Waits for the device."""
        table = self._copy.join().tolist()
        pairs: list[list[list[int]]] = [[[] for _ in table] for _ in table]
        for taker, (parent, *quota) in enumerate(table):
            pairs[parent][taker] = [expert for expert, rows in enumerate(quota) if rows]
        return pairs

    @property
    def places(self) -> list[int]:
        """The copied experts of this rank, ordered by the rank that takes a copy, then by number."""
        return [expert for experts in self.pairs[self.rank] for expert in experts]

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """([ranks], [ranks]) number of experts that this rank sends to each rank, and gets from each."""
        here = self.rank
        return [len(experts) for experts in self.pairs[here]], [len(takers[here]) for takers in self.pairs]

    @property
    def travels(self) -> bool:
        """Whether a copy travels between any ranks of the group."""
        return not self.in_place and any(experts for takers in self.pairs for experts in takers)


class RowPlaces:
    """Numbers of the places where rows are computed: a rank's experts come first, its copies follow.

    local: experts of a rank. wide: places of a rank. In place a home has the copies of all its experts: one for each
    overlap of its children and its experts on a line.
    """

    def __init__(self, ranks: int, local: int, in_place: bool) -> None:
        self.ranks, self.local, self.in_place = ranks, local, in_place
        self.wide = 2 * local + (ranks if in_place else 0)

    @property
    def total(self) -> int:
        """Places of all ranks."""
        return self.ranks * self.wide

    def of_homes(self, choices: Tensor) -> Tensor:
        """[...] the places of experts [...] at home; what is no expert stays none."""
        home = choices.div(self.local, rounding_mode="floor") * self.wide + choices % self.local
        return torch.where(choices < 0, choices, home)

    def of_rows(self, everyone: Tensor, rows: Tensor, forest: Forest) -> Tensor:
        """[R, N, k] the places of everyone's choices [R, N, k]. rows: [R, m] by home and expert.

        The rows of an expert go to ranks in ascending order, by source rank and token.
        """
        flat = everyone.flatten().long()
        experts = self.ranks * self.local
        key = torch.where((flat < 0) | (flat >= experts), experts, flat)
        order = key.argsort(stable=True)
        line = computed_rows(rows, forest).permute(1, 2, 0)  # home, expert, computing rank
        cell = torch.searchsorted(line.flatten().cumsum(0), torch.arange(len(flat), device=flat.device), right=True)
        cell.clamp_(max=line.numel() - 1)
        places = self._table(forest).permute(1, 2, 0).flatten().index_select(0, cell)
        placed = torch.empty_like(flat).scatter_(0, order, places)
        return torch.where(key == experts, self.of_homes(flat), placed).view(everyone.shape)

    def _table(self, forest: Forest) -> Tensor:
        """[R, R, m] the place of each expert of a home by the rank that computes its rows; any where it has none."""
        ranks, local = self.ranks, self.local
        number = torch.arange(ranks, device=forest.parent.device)
        home, rank = number[:, None], number[:, None, None]
        copied = forest.quota > 0
        slot = copied.cumsum(1) - 1  # [taker, expert]
        if self.in_place:
            mine = (forest.parent == home) * copied.sum(1)  # [home, taker]
            before = mine.cumsum(1).t() - mine.t()  # [taker, home]
            copies = home * self.wide + local + before.unsqueeze(2) + slot.unsqueeze(1)
        else:
            copies = (rank * self.wide + local + slot.unsqueeze(1)).expand(ranks, ranks, local)
        own = home * self.wide + torch.arange(local, device=number.device)
        return torch.where(rank == home, own, copies)


class Evener:
    """Makes the rows of one layer even."""

    def __init__(self, policy: EvenRows) -> None:
        self.policy = policy

    def plan(self, everyone: Tensor, shape: Shape, tokens: int) -> tuple[Choices, Counts, CopiedExperts]:
        """This rank's choices, all counts by places, and the copies. everyone: [R, N, k] choices.

        tokens: those of this rank. Choices lie in the order of homes, by which tokens' sums are formed.
        """
        counts = counts_of_experts(everyone, shape)
        rows = counts.rows.sum(0).view(shape.ranks, shape.local)
        forest = plan_forest(rows, self.policy.within)
        places = RowPlaces(shape.ranks, shape.local, self.policy.in_place)
        placed = places.of_rows(everyone, rows, forest)
        shape = replace(shape, experts=places.total)
        by_place = counts_of_experts(placed, shape)
        by_place.table[:, -1] |= counts.flags
        mine = everyone[shape.rank, :tokens].long()
        choices = ascending(places.of_homes(mine), places.total)
        unsorted = ascending(placed[shape.rank, :tokens], places.total).unsorted
        return replace(choices, unsorted=unsorted), by_place, CopiedExperts(forest, shape.rank, self.policy.in_place)


class CopyingRoute(Protocol):
    """The part of a `Route` that copies use."""

    @property
    def copies(self) -> CopiedExperts | None: ...


class CopyExchange(Exchange):
    """Sends the weights of copied experts, [sent, ...], to the ranks that compute some of their rows, [received, ...].

    The backward brings the copies' gradients home, in the order of what was sent. Without a copy nothing is sent, as
    all ranks know; in place the copies stay.
    """

    label, differentiable = "hot", True

    def __init__(self) -> None:
        super().__init__()
        self.nobody = SoloCommunicator("hot")

    def start(self, route: CopyingRoute, *payload: Tensor) -> Pending:
        return self._start(route, payload, self.label)

    def start_backward(self, route: CopyingRoute, *gradients: Tensor) -> Pending:
        return self._start(route, [each.contiguous() for each in gradients], f"{self.label} backward", reverse=True)

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        return self.finish(pending)

    def _start(self, route: CopyingRoute, tensors: Sequence[Tensor], label: str, reverse: bool = False) -> Pending:
        copies = route.copies
        assert copies is not None
        if not copies.travels:
            each = [len(tensors[0])]
            return Pending(self.nobody, self.nobody.all_to_all(tensors, each, each, label))
        send, receive = copies.splits[::-1] if reverse else copies.splits
        group = self.group.expert
        return Pending(group, group.all_to_all(tensors, send, receive, label))
