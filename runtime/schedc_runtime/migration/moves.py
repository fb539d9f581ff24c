"""Moves experts of one layer between ranks: rows of stacked tensors go into staging, then into place.

    tensor [local, ...]  --pack--> rows by target rank --[all-to-all]--> staging --commit--> tensor

Every tensor of a layer travels in the same message. Until `commit` nothing has changed, so that an error leaves the old
placement on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from schedc_runtime.device.choice import brought
from schedc_runtime.migration.expert_state import ExpertState
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.placement import ExpertPlaces
from schedc_runtime.ranks.exchange import Pending


@dataclass(frozen=True)
class RowMoves:
    """The rows that one rank sends and gets between two placements.

    leaving: [sent] rows here, by the rank that gets them. landing: [received] rows here, by the rank that sent them.
    send, receive: [ranks] number of rows for each rank, this one included.
    """

    leaving: tuple[int, ...]
    landing: tuple[int, ...]
    send: tuple[int, ...]
    receive: tuple[int, ...]

    @staticmethod
    def between(old: ExpertPlaces, new: ExpertPlaces, ranks: int, rank: int) -> RowMoves:
        """The moves of ``rank``. Experts that stay at their place do not move."""
        local = len(old.order) // ranks
        moved = [(old.places[expert], place) for place, expert in enumerate(new.order) if old.order[place] != expert]
        out = [pair for pair in moved if pair[0] // local == rank]
        come = sorted((pair for pair in moved if pair[1] // local == rank), key=lambda pair: pair[0] // local)
        return RowMoves(
            tuple(source % local for source, _ in out),
            tuple(place % local for _, place in come),
            tuple(sum(place // local == other for _, place in out) for other in range(ranks)),
            tuple(sum(source // local == other for source, _ in come) for other in range(ranks)),
        )


class LayerMove:
    """The way of one layer to another placement, as one rank takes it. state: what belongs to the experts here."""

    def __init__(self, layer: MoELayer, placement: ExpertPlaces, state: ExpertState) -> None:
        group = layer.routing.group
        self.layer, self.placement, self.state = layer, placement, state
        self.tensors = list(state.tensors.values())
        self.rows = RowMoves.between(layer.experts.placement, placement, group.size, group.rank)
        self._leaving: list[Tensor] = []
        self._pending: Pending | None = None
        self._staged: tuple[Tensor, ...] = ()

    @property
    def experts(self) -> int:
        """Number of the layer's experts that change their place."""
        old, new = self.layer.experts.placement.order, self.placement.order
        return sum(a != b for a, b in zip(old, new, strict=True))

    @property
    def bytes_sent(self) -> int:
        """Bytes that go to other ranks."""
        away = sum(self.rows.send) - self.rows.send[self.layer.routing.group.rank]
        return away * self.state.bytes_of_expert

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the rows that leave."""
        index = brought(list(self.rows.leaving), self.tensors[0].device)
        self._leaving = [tensor.index_select(0, index) for tensor in self.tensors]

    def start(self) -> None:
        """Send them."""
        members = self.layer.routing.group.expert
        rows = self.rows
        self._pending = Pending(members, members.all_to_all(self._leaving, rows.send, rows.receive, "move"))

    def stage(self) -> None:
        """Wait for the rows that come."""
        assert self._pending is not None
        self._staged = self._pending.communicator.wait(self._pending.handle)
        self._pending, self._leaving = None, []

    @torch.no_grad()
    def commit(self) -> None:
        """Put the rows that came into their places, by which choices are numbered from now on."""
        index = brought(list(self.rows.landing), self.tensors[0].device)
        for tensor, rows in zip(self.tensors, self._staged, strict=True):
            tensor.index_copy_(0, index, rows)
        self._staged = ()
        self.layer.place(self.placement)
