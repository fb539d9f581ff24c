"""Schedules and costs of rows for tests of unequal microbatches."""

from __future__ import annotations

import numpy as np

from schedc.elaborate import elaborate
from schedc.load.library import open_schedule
from schedc.step.dependencies import Dependencies


def known(name: str, **sizes: int) -> Dependencies:
    return Dependencies.of(elaborate(open_schedule(name), sizes or {"P": 4, "M": 16}))


def rows(count: int, seed: int = 0) -> list[int]:
    """Costs of microbatches: one in four is four times as long as the others are at most."""
    raw = np.random.default_rng(seed)
    return [int(each) for each in np.where(raw.random(count) < 0.25, 8_000, raw.integers(1_000, 2_000, count))]
