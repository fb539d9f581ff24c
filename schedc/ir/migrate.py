"""Experts that move to other ranks between steps, as a plan says it, and where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Migrate:
    """Experts that move to other ranks between steps.

    steps: from one choice of ranks to the next. gain: net gain of a step up to which experts stay, in percent of the
    time of a rank's experts.
    """

    steps: int
    gain: float = 0.0

    def refusals(self, *, alone: bool, capacity: bool, even: bool) -> Iterator[tuple[str, str]]:
        """What cannot be, and the remedy. alone: a rank has all experts. capacity: all ranks have the same rows.

        even: ``balance`` lets all ranks have the same rows, in one node.
        """
        if self.steps < 1:
            yield f"experts that migrate every {self.steps} steps", "write a number from 1 on"
        if not 0 <= self.gain < inf:
            help = "1 is a hundredth of the time of a rank's experts: write a number from 0 on"
            yield f"a gain above {self.gain:g} %", help
        if alone:
            help = "experts move between ranks that share them: write a `topology`, or leave the line out"
            yield "`migrate`, and a rank that has all experts", help
        if capacity:
            help = "leave one of the two lines out"
            yield "`migrate`, and a `capacity`, under which all ranks have the same rows", help
        if even:
            help = "beside `balance` experts move between nodes: leave one of the two lines out"
            yield "`migrate`, and `balance` in one node, whose ranks have the same rows", help
