"""Compares plans under common draws of what prices them: how often each is first, what decides, what to measure next.

All plans have the same draws, so that what slows all of them decides nothing. A draw has a value for every constant of
the cost model, and for models with experts a spread of their loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int64

WITHIN = 0.05
"""Plans whose steps differ by less, relatively, are nearly as good."""

_ALIKE = 1e-9
"""Plans whose steps differ by less in every draw, relatively, are one plan in other words."""

_BINS = 4
"""Quantiles of a constant between which its value is known."""

_PERMUTATIONS = 2000
_NOISE = 0.999
"""A worth is printed above this quantile of what labels without meaning are worth."""

_LEAST_SHARE = 0.05
"""A constant with a smaller share of a variance is not named. By chance 200 draws show it of one constant in 700."""


class Deciding(NamedTuple):
    """A constant that decides between two plans. share: of the variance of the logarithm of their ratio, 0 to 1.

    favours_first: whether the first plan gains where the constant is larger.
    """

    name: str
    share: float
    favours_first: bool


class Worth(NamedTuple):
    """What it is worth to know a constant: by which share of a step the expected loss of the best choice falls."""

    name: str
    share: float


@dataclass(frozen=True, eq=False)
class PlanChances:
    """Plans under common draws. steps: [plans, draws] seconds."""

    steps: Floats

    @cached_property
    def same(self) -> Int64:
        """[plans] the number of the first plan that has the same step in every draw: often the plan's own."""
        apart = np.abs(self.steps[:, None] / self.steps[None] - 1.0).max(axis=2)
        return np.asarray((apart <= _ALIKE).argmax(axis=1))

    @cached_property
    def best(self) -> Floats:
        """[draws] seconds of the fastest plan."""
        return np.asarray(self.steps.min(axis=0))

    @cached_property
    def losses(self) -> Floats:
        """[plans, draws] how much longer a plan takes than the fastest one, relatively."""
        return np.asarray(self.steps / self.best - 1.0)

    @property
    def one_each(self) -> Bools:
        """[plans] whether a plan is the first of those that are the same in other words."""
        return np.asarray(self.same == np.arange(len(self.same)))

    @cached_property
    def first_in(self) -> Floats:
        """[plans] share of draws in which a plan is the fastest. Plans that are the same have the same share.

        Different plans that tie in a draw share it evenly.
        """
        first = (self.losses <= _ALIKE) & self.one_each[:, None]
        return np.asarray((first / first.sum(axis=0)).mean(axis=1)[self.same])

    @property
    def within(self) -> Floats:
        """[plans] share of draws in which a plan takes at most `WITHIN` longer than the fastest."""
        return np.asarray((self.losses <= WITHIN).mean(axis=1))

    @property
    def loss(self) -> Floats:
        """[plans] how much longer a plan takes than the fastest one of each draw, relatively, the mean."""
        return np.asarray(self.losses.mean(axis=1))

    @property
    def favourites(self) -> tuple[int, int | None]:
        """The plan that is first most often, and another one that is first next often; None if none ever is."""
        order = sorted(np.flatnonzero(self.one_each).tolist(), key=lambda plan: (-self.first_in[plan], plan))
        second = order[1] if len(order) > 1 and self.first_in[order[1]] > 0 else None
        return order[0], second

    def deciding(self, first: int, second: int, logs: Mapping[str, Floats]) -> list[Deciding]:
        """The constants that decide between two plans, most of all first.

        logs: [draws] logarithms by name. A share is the squared correlation with the logarithm of the ratio of steps.
        """
        ratio = np.log(self.steps[second] / self.steps[first])
        deciding = []
        for name, values in logs.items():
            both = float(values.std() * ratio.std())
            correlation = float(((values - values.mean()) * (ratio - ratio.mean())).mean()) / both if both else 0.0
            if correlation**2 >= _LEAST_SHARE:
                deciding.append(Deciding(name, correlation**2, correlation > 0))
        return sorted(deciding, key=lambda each: -each.share)

    def worths(self, logs: Mapping[str, Floats], seed: int) -> list[Worth]:
        """What it is worth to know each constant, the largest first; none that chance would show.

        Without knowledge the plan with the least expected loss is chosen. Who knows between which quartiles a constant
        is chooses the best plan there. Labels without meaning lower the expected loss of these draws, too: what they
        are worth on average is taken off.
        logs: [draws] values by name, in any unit.
        """
        losses = self.losses[self.one_each]
        rank = np.arange(losses.shape[1]) * _BINS // losses.shape[1]
        rng = np.random.default_rng(seed)
        chance = np.array([_known(losses, rng.permutation(rank)) for _ in range(_PERMUTATIONS)])
        least, usual = float(np.quantile(chance, _NOISE)), float(chance.mean())
        worths = []
        for name, values in logs.items():
            labels = np.empty_like(rank)
            labels[np.argsort(values, kind="stable")] = rank
            if (worth := _known(losses, labels)) > least:
                worths.append(Worth(name, worth - usual))
        return sorted(worths, key=lambda each: -each.share)


def _known(losses: Floats, labels: Int64) -> float:
    """By how much the expected loss falls if the choice may depend on labels. losses: [plans, draws]."""
    sums = losses @ np.equal.outer(labels, np.arange(_BINS)).astype(np.float64)
    alone, knowing = sums.sum(axis=1).min(), sums.min(axis=0).sum()
    return float(alone - knowing) / len(labels)
