"""How sure the constants are: the spread of their logarithms, and vectors of constants drawn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.times.constants import (
    BY_NAME,
    CONSTANTS,
    NAMES,
    OF_CLOCK,
    SUSTAINED,
    ConstantVectors,
    described,
    on_device,
    sustained,
)

Triangle: TypeAlias = Sequence[Sequence[float]]
"""[n] rows of the lower triangle of L, the first of 1 number, the last of n: a covariance is L L'."""

ROW_SPREAD = 0.05
"""Logarithm by which a measured step differs from a good prediction, where no rows tell."""

UNDECIDED = 0.9
"""Share of its prior's width from which on a constant says what the prior says."""

_LEAST = 1e-12


@dataclass(frozen=True, eq=False)
class ConstantSpread:
    """What is known of all constants: normal logarithms.

    median: [constants] values, in the order of `NAMES`. logs: [constants, constants] covariance of their logarithms.
    rows: logarithm by which steps differ from predictions, even with the right constants.
    """

    median: Floats
    logs: Floats
    rows: float = ROW_SPREAD

    @classmethod
    def of_priors(cls, values: Mapping[str, float] | None = None) -> ConstantSpread:
        """The spread of the priors, about these values; about the priors' medians where none are given."""
        return cls.of_fit(values or {}, (), "")

    @classmethod
    def of_fit(
        cls, values: Mapping[str, float], triangle: Triangle, device: str, rows: float = ROW_SPREAD
    ) -> ConstantSpread:
        """The spread of the constants of a fit, for runs on a device.

        values: by name, clocks of devices included. triangle: of the covariance of the first of these constants, in
        widths of their priors. Other constants are independent, with their prior's width. A device without a clock
        among others that have one has the prior of clocks.
        """
        clock = [SUSTAINED + device] if any(name.startswith(SUSTAINED) for name in values) else []
        names = [*NAMES, *clock]
        widths = np.array([described(name).width for name in names])
        inner = np.eye(len(names))
        fitted = [name for name, _ in zip(values, triangle, strict=False)]
        kept = [place for place, name in enumerate(fitted) if name in names]
        at = np.array([names.index(fitted[place]) for place in kept], np.int64)
        inner[np.ix_(at, at)] = covariance_of(triangle)[np.ix_(kept, kept)]
        own = np.eye(len(NAMES), len(names))
        own[[NAMES.index(name) for name in OF_CLOCK], len(NAMES) :] = 1.0
        logs = own @ (inner * np.outer(widths, widths)) @ own.T
        here = on_device(values, device)
        return cls(np.array([here.get(each.name, each.median) for each in CONSTANTS]), logs, rows)

    def with_owner(self, owner: str, other: ConstantSpread) -> ConstantSpread:
        """This spread with the constants of an owner as another one has them, independent of the rest."""
        theirs = np.array([each.owner == owner for each in CONSTANTS])
        inside, outside = np.outer(theirs, theirs), np.outer(~theirs, ~theirs)
        return ConstantSpread(
            np.where(theirs, other.median, self.median),
            np.where(inside, other.logs, np.where(outside, self.logs, 0.0)),
            max(self.rows, other.rows),
        )

    def borrowed(self) -> ConstantSpread:
        """This spread on another device of the same kind, whose clock differs by the prior's width of clocks."""
        shared = np.array([name in OF_CLOCK for name in NAMES], np.float64)
        return replace(self, logs=self.logs + sustained("").width ** 2 * np.outer(shared, shared))

    @property
    def widths(self) -> dict[str, float]:
        """The standard deviation of the logarithm of each constant."""
        return dict(zip(NAMES, np.sqrt(np.diag(self.logs)).tolist(), strict=True))

    @property
    def undecided(self) -> tuple[str, ...]:
        """The constants that are about as wide as their priors: no row decides them."""
        return tuple(name for name, width in self.widths.items() if width >= UNDECIDED * BY_NAME[name].width)

    def draws(self, number: int, seed: int = 0) -> ConstantVectors:
        """So many vectors of constants; none is beyond what makes sense. One seed always gives the same vectors.

        A Latin hypercube: of each independent direction every quantile is drawn once. So shares of draws differ less
        between seeds than those of independent draws.
        """
        rng = np.random.default_rng(seed)
        size = number, len(NAMES)
        shares = (np.argsort(rng.random(size), axis=0) + rng.random(size)) / number
        inverse = NormalDist().inv_cdf
        normal = np.array([inverse(min(max(share, _LEAST), 1.0 - _LEAST)) for share in shares.ravel().tolist()])
        logs = normal.reshape(size) @ np.linalg.cholesky(self.logs).T
        most = np.array([BY_NAME[name].most for name in NAMES])
        return ConstantVectors.of(NAMES, np.minimum(self.median * np.exp(logs), np.maximum(most, self.median)))


def triangle_of(covariance: Floats) -> tuple[tuple[float, ...], ...]:
    """The triangle of a covariance [n, n], to four digits: positive definite whatever they round to."""
    lower = np.linalg.cholesky(covariance)
    return tuple(
        tuple(float(f"{number:.4g}") for number in row[: place + 1]) for place, row in enumerate(lower.tolist())
    )


def covariance_of(triangle: Triangle) -> Floats:
    """[n, n] the covariance of a triangle."""
    lower = np.zeros((len(triangle), len(triangle)))
    for place, row in enumerate(triangle):
        lower[place, : place + 1] = row
    return np.asarray(lower @ lower.T)


def triangle_of_widths(widths: Sequence[float]) -> Triangle:
    """The triangle of independent constants. widths: [n] in widths of their priors."""
    return tuple((0.0,) * place + (width,) for place, width in enumerate(widths))
