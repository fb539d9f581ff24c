"""Predicts the loads of a layer's experts from those of the last steps, by the rule with the least past error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_JUDGED = 16
"""Steps, the last ones, whose loads rules are judged by."""


def _weights(rule: str, steps: int) -> NDArray[np.float64]:
    """[steps] weights of the steps so far, the oldest first. They sum to 1."""
    age = np.arange(steps)[::-1]
    weights = {"last": age < 1, "mean of 10": age < 10, "decay 0.9": 0.9**age}[rule]
    return np.asarray(weights / weights.sum())


RULES = ("last", "mean of 10", "decay 0.9")


class Forecast(NamedTuple):
    """The load of the next steps. rule: one of `RULES`. share: [experts] part of all choices, which sums to 1.

    error: mean over past steps of the summed differences between predicted and true shares; 0 after one step.
    """

    rule: str
    share: NDArray[np.float64]
    error: float


def forecast(loads: NDArray[np.int64]) -> Forecast:
    """The forecast from ``loads`` [steps, experts], the oldest first. Among equal errors the first rule stays."""
    steps, experts = loads.shape
    totals = loads.sum(1, keepdims=True)
    shares = np.where(totals > 0, loads / np.maximum(totals, 1), 1 / experts)
    judged = range(max(1, steps - _JUDGED), steps)
    errors = {
        rule: float(np.mean([np.abs(_weights(rule, step) @ shares[:step] - shares[step]).sum() for step in judged]))
        if judged
        else 0.0
        for rule in RULES
    }
    best = min(RULES, key=lambda rule: errors[rule])
    return Forecast(best, _weights(best, steps) @ shares, errors[best])
