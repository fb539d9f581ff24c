"""`MicrobatchOffload`: the boxes of one microbatch on one stage, and their way to the host and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.errors import StageError
from schedc_runtime.offload.account import Account, Reason
from schedc_runtime.offload.boxes import Box, BoxNote, PlaceOfBox, Shelf
from schedc_runtime.offload.host_buffers import starts_in_buffer
from schedc_runtime.offload.lanes import FROM_HOST, TO_HOST, Lanes
from schedc_runtime.offload.rules import INPUT, NAMES, Rules


@dataclass(frozen=True)
class _Journey:
    """A box on its way. slot: [bytes] uint8, its part of the host buffer."""

    box: Box
    slot: Tensor


class MicrobatchOffload:
    """The boxes that a microbatch holds for the backward, and their place.

    stage: how errors call the stage. names: of its segments, by number.
    """

    def __init__(self, stage: str, names: Mapping[int, str], rules: Rules, lanes: Lanes, account: Account) -> None:
        self.stage, self.names = stage, names
        self.place = PlaceOfBox.HERE
        self._rules, self._lanes, self._account = rules, lanes, account
        self._device: torch.device | None = None
        self._shelf = Shelf()
        self._stay: dict[int, tuple[str, Reason, int]] = {}
        """Storages that stay, by number: the segment, why, and bytes."""
        self._journeys: list[_Journey] = []
        self._buffer: Tensor | None = None
        self._handle: Any = None

    def note(self, node: int, tensor: Tensor) -> BoxNote | None:
        """The note for a tensor [...] that autograd saves in a segment; None if it stays on the device."""
        if self._rules.is_own(tensor):
            return None
        if self._device is None and type(tensor) is Tensor:
            self._device = tensor.device
        reason = self._rules.refusal(node, tensor, self._device or tensor.device)
        name = self.names.get(node) or NAMES[node]
        if reason is None:
            return self._shelf.box(f"{self.stage}, {name}", tensor).add(tensor)
        if reason is not Reason.FORM:
            self._stay.setdefault(tensor.untyped_storage()._cdata, (name, reason, tensor.untyped_storage().nbytes()))
        else:
            self._stay.setdefault(-len(self._stay), (name, reason, tensor.numel() * tensor.itemsize))
        return None

    def hold(self, tensors: Sequence[Tensor]) -> tuple[Tensor | BoxNote, ...]:
        """The inputs of a forward that will run a second time, or their notes; `values_of` gives them back."""
        return tuple([tensor if (note := self.note(INPUT, tensor)) is None else note for tensor in tensors])

    def start_offload(self) -> int:
        """Start copying to the host what may leave; returns its bytes."""
        self._expect(PlaceOfBox.HERE, "an offload starts")
        boxes = [box for box in self._shelf.boxes() if self._leaves(box)]
        self._journeys = self._packed(boxes)
        copies = [(journey.slot, journey.box.source()) for journey in self._journeys]
        self._handle = self._lanes.run(TO_HOST, lambda: _copy(copies))
        self._place(PlaceOfBox.LEAVING)
        return sum(box.bytes for box in boxes)

    def join_offload(self) -> int:
        """Behind the copies: free the storages; returns the bytes that were freed."""
        self._expect(PlaceOfBox.LEAVING, "an offload is joined")
        self._join()
        for journey in self._journeys:
            journey.box.check_unwritten()
        dropped = [(journey.box, journey.box.drop()) for journey in self._journeys]
        self._place(PlaceOfBox.AWAY)
        released = 0
        for box, weak in dropped:
            if weak.expired():  # type: ignore[no-untyped-call]
                released += box.bytes
            else:
                self._account.stays(self._segment(box), Reason.HELD, box.bytes)
                self._rules.is_held(weak)
        self._account.offloads += 1
        self._account.moved += sum(box.bytes for box, _ in dropped)
        self._account.released += released
        for name, reason, count in self._stay.values():
            self._account.stays(name, reason, count)
        return released

    def start_fetch(self) -> int:
        """Allocate what the boxes need and start copying it back; returns its bytes."""
        self._expect(PlaceOfBox.AWAY, "a fetch starts")
        for journey in self._journeys:
            journey.box.flat = torch.empty(journey.box.bytes, dtype=torch.uint8, device=self._device)
        copies = [(journey.box.flat, journey.slot) for journey in self._journeys]
        self._handle = self._lanes.run(FROM_HOST, lambda: _copy(copies))
        self._place(PlaceOfBox.COMING)
        return sum(journey.box.bytes for journey in self._journeys)

    def join_fetch(self) -> None:
        """Behind the copies: the boxes are on the device, and the host buffer is free."""
        self._expect(PlaceOfBox.COMING, "a fetch is joined")
        self._join()
        self._place(PlaceOfBox.HERE)
        self.give_up()

    def check_here(self, what: str) -> None:
        """Raise `StageError` unless everything is on the device. what: what needs it."""
        if self.place is not PlaceOfBox.HERE:
            raise StageError(
                f"{self.stage}: {what} comes while what its forward saved is {self.place.value}",
                "join a fetch of this stage and microbatch before it",
            )

    def give_up(self) -> None:
        """Return the host buffer. Boxes that are not on the device stay so: their values are lost."""
        with suppress(Exception):  # its own join has raised it, or the step has failed before
            self._join()
        if self._buffer is not None:
            self._lanes.buffers.give(self._buffer)
        self._buffer, self._journeys = None, []

    def _join(self) -> None:
        """Let compute go on behind the copies. Raises what they raised, once."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._lanes.join(handle)

    def _leaves(self, box: Box) -> bool:
        """Whether a box leaves. A box stays if its storage has other holders: a segment whose role stays, or a larger
        tensor. A copy would then free nothing.
        """
        box.check_unwritten()
        if box.storage in self._stay:
            return False
        if box.covered < box.bytes and box.holders:
            self._stay[box.storage] = (self._segment(box), Reason.SHARED, box.covered)
            return False
        return True

    def _packed(self, boxes: Sequence[Box]) -> list[_Journey]:
        """Every box with its part of one host buffer."""
        if not boxes:
            return []
        *starts, end = starts_in_buffer(box.bytes for box in boxes)
        self._buffer = buffer = self._lanes.buffers.take(end, end - sum(box.bytes for box in boxes))
        return [_Journey(box, buffer[start : start + box.bytes]) for box, start in zip(boxes, starts, strict=True)]

    def _place(self, place: PlaceOfBox) -> None:
        self.place = place
        for journey in self._journeys:
            journey.box.place = place

    def _expect(self, place: PlaceOfBox, what: str) -> None:
        if self.place is not place:
            raise StageError(f"{self.stage}: {what} of what is {self.place.value}, and not {place.value}")

    def _segment(self, box: Box) -> str:
        return box.name.removeprefix(f"{self.stage}, ")


def _copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Copy each source into its target."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
