"""The rule that tells slow ranks from noise. Plain numbers in, alarms out; no torch is loaded.

A rank's time for a kind of instruction is compared with the rank's own baseline, because stages differ. From that ratio
goes the median ratio of the other ranks in the same step, because a machine may slow all of them. `ALL` is the median
over the kinds of a rank, and the lower of two in the middle. Two tests follow. m is a median, s its standard error:

    windows  m - s > log `SLOWER` over `WINDOW` steps, twice in a row, and m - 3.5 s > log `SLOWER` over both together
    drift    a cumulative sum of steps, each of them limited to four standard deviations (Page, Biometrika 1954), over
             at least two windows of which the median is above log `SLOWER`; of `ALL` only, since the noise of one kind
             lasts for many steps

An alarm for a rank and a kind comes once. It comes again only after a window in which the rank was not slow. Where all
kinds of a rank are slow, one alarm says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import median, median_low
from typing import NamedTuple

WINDOW = 10
"""Steps of a window."""
WARMING = 10
"""Steps that are left out first: they load, allocate and compile."""
BASELINE = 120
"""Steps of the baseline. With 20 of them usual times were off by up to a tenth on a busy machine."""
SETTLED = 1.05
"""By how much the halves of a baseline may differ. Beside changing loads, usual times of kinds were off by 1.15."""
SLOWER = 1.10
"""A rank is slow from this multiple of its baseline on."""
_EACH, _BOTH = 1.0, 3.5
"""Standard errors by which one window must be slower, and two in a row together. With three for each of two windows, a
third of the slowdowns by 1.25 was passed over: a window of ten steps has a standard error of 0.035."""
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
"""The kind of a rank that is slow as a whole."""

BETWEEN = "between steps"
"""The kind of the time between steps. It is no part of `ALL`, and it has no drift: its noise lasts for many steps."""

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
        if self.kind == BETWEEN:
            percent = 100 * (self.factor - 1)
            return (
                f"{name} takes {percent:.0f} % of a step longer {BETWEEN} than usual, since step {self.since}:"
                " its data loader, or other work there"
            )
        by = ", by a slow drift" if self.drift else ""
        return f"{name} takes {self.factor:.2f} times its usual time for {self.kind}, since step {self.since}{by}"


Key = tuple[int, str]
"""A rank and a kind."""
_Excess = dict[Key, float]


class _Suspect(NamedTuple):
    """A rank and kind that were slow in the last window. since: first step of the first such window in a row."""

    since: int
    values: list[float]


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
        self._steps: list[tuple[int, _Excess]] = []
        self._suspects: dict[Key, _Suspect] = {}
        self._told: set[Key] = set()
        self._sums: dict[Key, _Sum] = {}
        found: dict[Key, list[float]] = {}
        for ratios in quiet:
            for key, excess in _excess(ratios).items():
                found.setdefault(key, []).append(excess)
        self._deviations = {key: max(_LEAST, _deviation(values)) for key, values in found.items() if key[1] == ALL}

    def step(self, number: int, ratios: Ratios) -> list[Alarm]:
        """Take in one step. Returns the ranks that are found at its end."""
        excess = _excess(ratios)
        self._steps.append((number, excess))
        alarms = list(self._drifts(number, excess))
        if len(self._steps) == WINDOW:
            alarms += self._window()
            self._steps = []
        named = {alarm.rank for alarm in alarms if not alarm.drift and alarm.kind != BETWEEN}
        whole = {alarm.rank for alarm in alarms if alarm.kind == ALL}
        new = {
            (alarm.rank, alarm.kind): alarm
            for alarm in alarms
            if not (alarm.drift and alarm.rank in named) and (alarm.kind in (ALL, BETWEEN) or alarm.rank not in whole)
        }
        fresh = [alarm for key, alarm in sorted(new.items()) if key not in self._told]
        self._told |= {key for key in excess if key in new or (key[0] in whole and key[1] != BETWEEN)}
        self._sums.update({key: _Sum() for key in new})
        return fresh

    def _window(self) -> list[Alarm]:
        slow: dict[Key, _Suspect] = {}
        alarms = []
        for key in sorted({key for _, step in self._steps for key in step}):
            values = [step[key] for _, step in self._steps if key in step]
            if median(values) <= log(SLOWER):
                self._told.discard(key)
                continue
            if len(values) < WINDOW // 2 or not _is_slower(values, _EACH):
                continue
            before = self._suspects.get(key)
            slow[key] = _Suspect(before.since if before else self._steps[0][0], values)
            if before is not None and _is_slower(both := before.values + values, _BOTH):
                alarms.append(Alarm(*key, exp(median(both)), before.since))
        self._suspects = slow
        return alarms

    def _drifts(self, number: int, excess: _Excess) -> list[Alarm]:
        alarms = []
        for key in self._deviations.keys() & excess.keys():
            if any(rank == key[0] and kind != BETWEEN for rank, kind in self._told):
                continue
            sums = self._sums.setdefault(key, _Sum())
            if sums.add(number, excess[key], self._deviations[key]):
                alarms.append(Alarm(*key, exp(median(sums.excess)), sums.since, drift=True))
        return alarms


def moved(quiet: Sequence[Ratios]) -> Alarm | None:
    """The rank and kind whose halves of a baseline differ most; None where all differ by less than `SETTLED`."""
    steps = [_excess(ratios) for ratios in quiet]
    half = len(steps) // 2
    change = {
        key: median(step[key] for step in steps[half:]) - median(step[key] for step in steps[:half]) for key in steps[0]
    }
    most = max(change, key=lambda key: abs(change[key]), default=None)
    if most is None or abs(change[most]) <= log(SETTLED):
        return None
    return Alarm(*most, exp(change[most]), 0)


def _excess(ratios: Ratios) -> _Excess:
    """By rank and kind: the ratio without the median of the other ranks; nothing where one rank alone has the kind.

    Under `ALL`, the lower median over the kinds of a rank.
    """
    found: _Excess = {}
    ranks: dict[int, list[float]] = {}
    for kind, row in ratios.items():
        here = sorted((value, rank) for rank, value in enumerate(row) if value is not None)
        values = [value for value, _ in here]
        for place, (value, rank) in enumerate(here if len(here) > 1 else ()):
            others = values[:place] + values[place + 1 :]
            found[rank, kind] = value - median(others)
            if kind != BETWEEN:
                ranks.setdefault(rank, []).append(found[rank, kind])
    return found | {(rank, ALL): median_low(values) for rank, values in ranks.items()}


def _is_slower(values: Sequence[float], errors: float) -> bool:
    """Whether the median of steps is above log `SLOWER` by so many standard errors."""
    error = _OF_MEDIAN * _deviation(values) / sqrt(len(values))
    return median(values) - errors * error > log(SLOWER)


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation, by the median of absolute deviations."""
    middle = median(values)
    return _TO_DEVIATION * median([abs(value - middle) for value in values])
