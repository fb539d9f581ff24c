"""Accounts of one stage's offloads: bytes moved, bytes freed, and bytes that stayed, with reasons."""

from __future__ import annotations

import warnings
from collections import Counter
from enum import Enum


class Reason(Enum):
    """Why saved bytes stay on the device."""

    ROLE = "segments of its role do not move"
    SMALL = "too small to be worth a copy"
    INDEX = "integer indexes"
    FORM = "not a plain strided tensor on the stage's device"
    SHARED = "a part of a storage with other holders, such as the batch"
    HELD = "somebody else still holds the storage"


class Account:
    """The bytes of one stage's offloads.

    stage: how warnings call the stage.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.clear()
        self._told: set[str] = set()

    def clear(self) -> None:
        """Begin to count anew."""
        self.offloads = 0
        """Joined offloads."""
        self.moved = 0
        """Bytes that left in them."""
        self.released = 0
        """Bytes of the device that were free behind their JOINs."""
        self.kept: Counter[tuple[str, Reason]] = Counter()
        """Bytes that stayed on the device, by segment and reason."""

    def stays(self, segment: str, reason: Reason, count: int) -> None:
        """Note that ``count`` bytes stay. What has moved in vain is said once per segment."""
        self.kept[segment, reason] += count
        if reason is Reason.HELD and segment not in self._told:
            self._told.add(segment)
            warnings.warn(
                f"{self.stage}: {count:,} bytes of {segment} were copied to the host and stay on the device:"
                f" {reason.value}",
                stacklevel=2,
            )
