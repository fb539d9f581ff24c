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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from schedc.ir.balance import STEP_SLOTS
from schedc_runtime.device.choice import HostCopy
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import Choices, Counts
from schedc_runtime.moe.forest import Forest, computed_rows, plan_among
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.collective_calls import Communicator
from schedc_runtime.transport.collectives import SoloCommunicator


@dataclass(frozen=True)
class EvenRows:
    """How rows become even.

    within: most rows of a rank over the mean, by microbatch. in_place: copies stay at home. by_step: copies last for a
    step. slots: the most copies on a rank, by step; None: `STEP_SLOTS`. over_node: rows and copies stay in the node of
    their home; otherwise they move among all ranks of the group.
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
        return min(local, STEP_SLOTS if self.slots is None else self.slots)

    def peers(self, group: ExpertGroup) -> Communicator:
        """The ranks among which rows move: neighbours in the group, in its order."""
        return group.node if self.over_node else group.expert


Pairs = Sequence[Sequence[Sequence[int]]]
"""[homes, ranks] numbers of a home's experts, ascending, of which a rank holds copies; of `EvenRows.peers` alone."""


class CopiedExperts:
    """The copies of experts that peers hold, as the peer ``rank`` sees them.

    told: returns `pairs`, when they are first asked for.
    """

    def __init__(self, rank: int, in_place: bool, told: Callable[[], Pairs]) -> None:
        self.rank, self.in_place, self._told = rank, in_place, told

    @staticmethod
    def of_forest(forest: Forest, rank: int, in_place: bool, peers: int) -> CopiedExperts:
        """The copies of one microbatch, among ``peers`` neighbours. The host waits for them where weights travel."""
        first = rank - rank % peers
        table = torch.cat([forest.parent.unsqueeze(1) - first, forest.quota], 1)
        copy = HostCopy(table[first : first + peers])

        def told() -> Pairs:
            table = copy.join().tolist()
            pairs: list[list[list[int]]] = [[[] for _ in table] for _ in table]
            for taker, (parent, *quota) in enumerate(table):
                pairs[parent][taker] = [expert for expert, rows in enumerate(quota) if rows]
            return pairs

        return CopiedExperts(rank - first, in_place, told)

    @cached_property
    def pairs(self) -> Pairs:
        """Which copies there are. May wait for the device."""
        return self._told()

    @property
    def places(self) -> list[int]:
        """The copied experts of this rank, ordered by the rank that takes a copy, then by number."""
        return [expert for experts in self.pairs[self.rank] for expert in experts]

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """([peers], [peers]) number of experts that this rank sends to each peer, and gets from each."""
        here = self.rank
        return [len(experts) for experts in self.pairs[here]], [len(takers[here]) for takers in self.pairs]

    @property
    def travels(self) -> bool:
        """Whether a copy travels between any peers."""
        return not self.in_place and any(experts for takers in self.pairs for experts in takers)


class RowPlaces(NamedTuple):
    """Numbers of the places where rows are computed: a rank's experts come first, its copies follow.

    wide: places of a rank. local: experts of a rank. numbers: [R, R, m] the place of each expert of a home by the rank
    that computes its rows; any where it has none.
    """

    wide: int
    local: int
    numbers: Tensor

    @staticmethod
    def of_forest(forest: Forest, in_place: bool, peers: int) -> RowPlaces:
        """The places of a microbatch. In place a home has the copies of all its experts: one for each overlap of its
        children, which are among its ``peers``, and its experts on a line."""
        local = forest.quota.shape[1]
        wide = 2 * local + (peers if in_place else 0)
        return RowPlaces(wide, local, _numbers(forest.parent, forest.quota > 0, wide, in_place))

    @property
    def total(self) -> int:
        """Places of all ranks."""
        return len(self.numbers) * self.wide

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


class Evener:
    """Makes the rows of one layer even among ``peers`` neighbouring ranks."""

    def __init__(self, policy: EvenRows, peers: int) -> None:
        self.policy, self.peers = policy, peers

    def plan(self, choices: Choices, counts: Counts) -> tuple[Choices, Counts, CopiedExperts]:
        """This rank's choices, all counts by places, and the copies. Choices lie in the order of homes, by which
        tokens' sums are formed."""
        shape, rows = counts.shape, counts.rows.long()
        of_homes = rows.sum(0).view(shape.ranks, shape.local)
        forest = plan_among(of_homes, self.policy.within, self.peers)
        places = RowPlaces.of_forest(forest, self.policy.in_place, self.peers)
        placed = placed_rows(choices, counts, places, computed_rows(of_homes, forest))
        return *placed, CopiedExperts.of_forest(forest, shape.rank, self.policy.in_place, self.peers)


def placed_rows(choices: Choices, counts: Counts, places: RowPlaces, computed: Tensor) -> tuple[Choices, Counts]:
    """A rank's choices and all counts by places. computed: [R, R, m] as of `RowPlaces.of_rows`."""
    shape, rows = replace(counts.shape, experts=places.total), counts.rows.long()
    table = torch.cat([places.counts(rows, computed), counts.table[:, -2:]], 1)
    placed = places.of_rows(choices.unsorted, rows, shape.rank, computed)
    kind = torch.int16 if places.total < 2**15 - 1 else torch.int32
    ids = places.of_homes(choices.ids.int()).to(kind)
    return Choices(ids, choices.slots, placed.to(kind)), Counts(table.to(torch.int32), shape)


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

    def __init__(self, policy: EvenRows) -> None:
        super().__init__()
        self.policy, self.nobody = policy, SoloCommunicator("hot")

    @property
    def lane(self) -> str:
        return "node" if self.policy.over_node else super().lane

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
        peers = self.policy.peers(self.group)
        return Pending(peers, peers.all_to_all(tensors, send, receive, label))
