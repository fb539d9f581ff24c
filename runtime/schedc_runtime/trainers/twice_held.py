"""Which tensors lie on several nodes anyway, such as those of twins and replicas: neighbours need no copy of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from schedc_runtime.keeper.peering import Nodes
from schedc_runtime.keeper.start import KeeperMeeting
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.trainers.box_file import HeldBox
from schedc_runtime.trainers.image_writer import ImageWriter

_TIMES = 2
"""How often ranks tell what they hold: before an update, and behind one, when the optimizer has its state."""


class TwiceHeld:
    """The boxes that several nodes hold. Boxes that come later are copied to neighbours, wherever they lie.

    moves: gives how often experts have moved so far; boxes of experts are others behind a move.
    """

    def __init__(self, control: ControlPlane, nodes: Nodes, moves: Callable[[], int] = lambda: 0) -> None:
        self._control, self._nodes, self._moves = control, nodes, moves
        self._twice: set[str] = set()
        self._told = self._moved = 0

    @property
    def due(self) -> bool:
        """Whether ranks should compare their boxes. The same on all ranks."""
        return self._told < _TIMES or self._moves() != self._moved

    def tell(self, boxes: Sequence[HeldBox]) -> list[int]:
        """[ranks] bytes that go to the neighbour. A collective."""
        self._told, self._moved = self._told + 1, self._moves()
        own = [[_mark(box.name, box.offset, box.tensor.shape), box.tensor.nbytes] for box in boxes]
        everyone = self._control.gather("comparing what nodes hold", own)
        nodes = ({mark for rank in ranks for mark, _ in everyone[rank]} for ranks in self._nodes.ranks)
        counts = Counter(mark for marks in nodes for mark in marks)
        self._twice = {mark for mark, count in counts.items() if count > 1}
        return [sum(size for mark, size in each if mark not in self._twice) for each in everyone]

    def notes(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """What the description of an image says of it. entries: by name, those of a manifest."""
        boxes = ((name, box) for name, entry in entries.items() for box in entry["boxes"])
        keys = [box["key"] for name, box in boxes if _mark(name, box["offset"], box["size"]) in self._twice]
        return {"elsewhere": keys} if keys else {}


def begin_copies(
    meeting: KeeperMeeting, writer: ImageWriter, boxes: Sequence[HeldBox], pipe: Pipeline
) -> tuple[TwiceHeld, list[int]]:
    """Let states go to neighbours from now on. Returns also, by rank, the bytes of a state. A collective."""
    assert meeting.nodes is not None
    twice = TwiceHeld(meeting.control, meeting.nodes, lambda: pipe._runner.moves)
    writer.notes = twice.notes
    copied = twice.tell(boxes)
    meeting.open()
    return twice, copied


def _mark(name: str, offset: Sequence[int], size: Sequence[int]) -> str:
    """A short text that tells boxes apart."""
    return blake2b(repr((name, [*offset], [*size])).encode(), digest_size=8).hexdigest()
