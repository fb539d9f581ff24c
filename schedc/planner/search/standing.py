"""Where a search stands while it runs: the share of plans that is decided, the time that is left, the best step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple, Protocol


class SearchStanding(NamedTuple):
    """Where a search stands.

    decided: share of the plans within memory that cannot change the answer any more; None for a front. left: what the
    rest takes at the pace so far; None while the pace is not known. best_s: the shortest step among plans whose step is
    exact; None before there is one.
    """

    decided: float | None
    left: SecondsLeft | None
    best_s: float | None


class SearchProgress(Protocol):
    """Takes the name of a stage, and how many plans it has seen."""

    def __call__(self, stage: str, count: int, standing: Callable[[], SearchStanding] | None = None) -> None:
        """standing: gives the standing of the search, once plans are bounded."""


@dataclass(eq=False)
class Pace:
    """CPU seconds of plans of one kind, as far as they are done.

    plans: done. spans: stretches of time that were measured. seconds: of all. squares: of the seconds of each stretch,
    over its plans.
    """

    plans: int = 0
    spans: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    _begun: float = 0.0

    def add(self, plans: int, seconds: float) -> None:
        """Counts a stretch. Without plans its time is that of the next plan."""
        self._begun += seconds
        if plans:
            self.squares += self._begun**2 / plans
            self.plans, self.spans, self.seconds = self.plans + plans, self.spans + 1, self.seconds + self._begun
            self._begun = 0.0

    def left(self, least: int, most: int) -> SecondsLeft | None:
        """The time of so many more plans, with two standard deviations; None before two stretches are done."""
        if not most:
            return SecondsLeft(0.0, 0.0)
        if self.spans < 2:
            return None
        mean = self.seconds / self.plans
        variance = max(0.0, self.squares - self.seconds * mean) / (self.spans - 1)
        low, high = (_WIDTH * sqrt(variance * (count + count**2 / self.plans)) for count in (least, most))
        return SecondsLeft(max(0.0, least * mean - low), most * mean + high)


_WIDTH = 2.0
"""Standard deviations on each side of a time that is estimated."""


class SecondsLeft(NamedTuple):
    """Between which seconds the rest of a search takes."""

    least: float
    most: float

    def within(self, seconds: float) -> SecondsLeft:
        """The same where the rest ends after so many seconds."""
        return SecondsLeft(min(self.least, seconds), min(self.most, seconds))

    def times(self, factor: float) -> SecondsLeft:
        """So many times the seconds."""
        return SecondsLeft(self.least * factor, self.most * factor)


class OpenPlans(NamedTuple):
    """Plans that a search has yet to look at. simulated, priced, ordered: how many at least, and at most.

    files: plans of the answer, at most, that are priced at last, for their files.
    """

    simulated: tuple[int, int]
    priced: tuple[int, int]
    ordered: tuple[int, int]
    files: int = 0


def seconds_left(open: OpenPlans, pace: Mapping[str, Pace], most_ordered_s: float) -> SecondsLeft | None:
    """CPU seconds of the rest. most_ordered_s: after so many none is ordered. None while a pace is not known."""
    last = pace["ordered"].left(0, min(1, open.ordered[1])) or SecondsLeft(0.0, 0.0)
    ordered = pace["ordered"].left(*open.ordered) or SecondsLeft(0.0, most_ordered_s)
    parts = [
        pace["simulated"].left(*open.simulated),
        pace["priced"].left(*open.priced),
        ordered.within(most_ordered_s + last.most),
        pace["priced"].left(0, open.files) or pace["ordered"].left(0, open.files),  # ordered plans are priced, too
    ]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return SecondsLeft(sum(part.least for part in known), sum(part.most for part in known))
