"""The rule that tells slow ranks from noise. Plain numbers in, alarms out; no torch is loaded.

A rank's time for a kind of instruction is compared with the rank's own baseline, because stages differ. From that ratio
goes the median ratio of the other ranks in the same step, because a machine may slow all of them. Two tests follow:

    window   median m and standard error s over `WINDOW` steps: m - 3 s > log `SLOWER`, in two windows in a row
    drift    a cumulative sum of steps, each of them limited to four standard deviations (Page, Biometrika 1954), over
             at least two windows of which the median is above log `SLOWER`; of a rank's median over kinds, since the
             noise of one kind lasts for many steps

An alarm for a rank and a kind comes once. It comes again only after a window in which the rank was not slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import median
from typing import NamedTuple

WINDOW = 10
"""Steps of a window."""
WARMING = 10
"""Steps that are left out first: they load, allocate and compile."""
BASELINE = 60
"""Steps of which the medians are the baseline. With 20 of them medians were off by up to a tenth on a busy machine."""
SLOWER = 1.10
"""A rank is slow from this multiple of its baseline on."""
_LIMIT = 4.0
"""Standard deviations that a step counts for at most in the cumulative sum."""
_REFERENCE = log(SLOWER)
"""What a step may be slower without adding to the sum."""
_MOST = 12.0
"""The sum from which on there is an alarm."""
_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution by the median of absolute deviations."""
_OF_MEDIAN = 1.2533
"""The standard error of the median by that of the mean, for a normal distribution."""
_LEAST = 1e-3
"""The least standard deviation that is assumed."""

ALL = "all kinds"
"""The kind of a drift."""

Ratios = Mapping[str, Sequence[float | None]]
"""By kind: [ranks] logarithm of a rank's time in one step by its baseline; None where a rank runs none of the kind."""


class Alarm(NamedTuple):
    """A rank that has become slow.

    kind: of instructions, or `ALL`. factor: how many times its baseline a rank takes. since: the step from which on.
    drift: whether the cumulative sum found it.
    """

    rank: int
    kind: str
    factor: float
    since: int
    drift: bool = False

    def told(self, name: str) -> str:
        """The alarm in words. name: of the rank."""
        by = ", by a slow drift" if self.drift else ""
        return f"{name} takes {self.factor:.2f} times its usual time for {self.kind}, since step {self.since}{by}"


@dataclass
class _Sum:
    """The cumulative sum of a rank and kind. since: the step at which the sum left zero."""

    value: float = 0.0
    since: int = 0
    excess: list[float] = field(default_factory=list)

    def add(self, step: int, excess: float, deviation: float) -> bool:
        """Whether the sum has become too large."""
        scaled = max(-_LIMIT, min(_LIMIT, excess / deviation))
        if not self.value:
            self.since, self.excess = step, []
        self.value = max(0.0, self.value + scaled - _REFERENCE / deviation)
        self.excess.append(excess)
        long = len(self.excess) >= 2 * WINDOW
        return long and self.value > _MOST and median(self.excess) > log(SLOWER)


class SpeedRule:
    """Watches ranks, step by step. quiet: the steps of the baseline, which tell the noise."""

    def __init__(self, quiet: Sequence[Ratios]) -> None:
        self._steps: list[tuple[int, dict[tuple[int, str], float]]] = []
        self._suspects: dict[tuple[int, str], int] = {}
        self._told: set[tuple[int, str]] = set()
        self._sums: dict[tuple[int, str], _Sum] = {}
        found: dict[tuple[int, str], list[float]] = {}
        for ratios in quiet:
            for key, excess in _by_rank(_excess(ratios)).items():
                found.setdefault(key, []).append(excess)
        self._deviations = {key: max(_LEAST, _deviation(values)) for key, values in found.items()}

    def step(self, number: int, ratios: Ratios) -> list[Alarm]:
        """Take in one step. Returns the ranks that are found at its end."""
        excess = _excess(ratios)
        self._steps.append((number, excess))
        alarms = list(self._drifts(number, _by_rank(excess)))
        if len(self._steps) == WINDOW:
            alarms += self._window()
            self._steps = []
        named = {alarm.rank for alarm in alarms if not alarm.drift}
        new = {(alarm.rank, alarm.kind): alarm for alarm in alarms if not (alarm.drift and alarm.rank in named)}
        fresh = [alarm for key, alarm in sorted(new.items()) if key not in self._told]
        self._told |= new.keys()
        self._sums.update({key: _Sum() for key in new})
        return fresh

    def _window(self) -> list[Alarm]:
        first = self._steps[0][0]
        slow: dict[tuple[int, str], int] = {}
        alarms = []
        for key in sorted({key for _, step in self._steps for key in step}):
            values = [step[key] for _, step in self._steps if key in step]
            middle = median(values)
            error = _OF_MEDIAN * _deviation(values) / sqrt(len(values))
            if middle <= log(SLOWER):
                self._told -= {key, (key[0], ALL)}
            if len(values) < WINDOW // 2 or middle - 3 * error <= log(SLOWER):
                continue
            slow[key] = self._suspects.get(key, first)
            if key in self._suspects:
                alarms.append(Alarm(*key, exp(middle), slow[key]))
        self._suspects = slow
        return alarms

    def _drifts(self, number: int, excess: Mapping[tuple[int, str], float]) -> list[Alarm]:
        alarms = []
        for key, value in excess.items():
            if any(rank == key[0] for rank, _ in self._told):
                continue
            sums = self._sums.setdefault(key, _Sum())
            if key in self._deviations and sums.add(number, value, self._deviations[key]):
                alarms.append(Alarm(*key, exp(median(sums.excess)), sums.since, drift=True))
        return alarms


def _excess(ratios: Ratios) -> dict[tuple[int, str], float]:
    """By rank and kind: the ratio without the median of the other ranks; nothing where one rank alone has the kind."""
    found = {}
    for kind, ranks in ratios.items():
        here = {rank: value for rank, value in enumerate(ranks) if value is not None}
        for rank, value in here.items():
            others = [other for each, other in here.items() if each != rank]
            if others:
                found[rank, kind] = value - median(others)
    return found


def _by_rank(excess: Mapping[tuple[int, str], float]) -> dict[tuple[int, str], float]:
    """The median over the kinds of a rank, under `ALL`."""
    ranks: dict[int, list[float]] = {}
    for (rank, _), value in excess.items():
        ranks.setdefault(rank, []).append(value)
    return {(rank, ALL): median(values) for rank, values in ranks.items()}


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation, by the median of absolute deviations."""
    middle = median(values)
    return _TO_DEVIATION * median([abs(value - middle) for value in values])
