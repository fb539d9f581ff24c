"""Goodput under failures against simulated failures and a published run."""

from __future__ import annotations

import random
from math import exp

import pytest

from schedc.planner.answers.goodput import Failures, checkpoint_interval, goodput

HOUR = 3600.0


def simulated(failures: Failures, interval: float, wanted: int, seed: int = 1) -> float:
    """The share of time with progress until so many failures have come, one after the other."""
    draw = random.Random(seed)
    time = progress = 0.0
    next_failure = draw.expovariate(1 / failures.mtbf_s)
    restarting, seen = False, 0
    while seen < wanted:
        end = time + (failures.restart_s if restarting else interval + failures.checkpoint_s)
        if next_failure < end:
            time, restarting, seen = next_failure, True, seen + 1
            next_failure = time + draw.expovariate(1 / failures.mtbf_s)
        else:
            time, progress = end, progress + (0.0 if restarting else interval)
            restarting = False
    return progress / time


CASES = [
    Failures(50_000 * HOUR / 16_384, 10, 600),
    Failures(50_000 * HOUR / 1024, 60, 300),
    Failures(2000.0, 100, 400),
    Failures(2000.0, 1, 0),
]


@pytest.mark.parametrize("failures", CASES)
def test_goodput_is_that_of_ten_thousand_simulated_failures(failures: Failures) -> None:
    """To half a point, for the interval taken and for others."""
    best = checkpoint_interval(failures)
    for interval in (best, 3 * best):
        assert goodput(failures, interval) == pytest.approx(simulated(failures, interval, 10_000), abs=0.005)


@pytest.mark.parametrize("failures", CASES)
def test_no_other_interval_is_much_better(failures: Failures) -> None:
    best = goodput(failures, checkpoint_interval(failures))
    others = [goodput(failures, checkpoint_interval(failures) * factor) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert max(others) <= best + 0.001
    assert min(others) < best - 0.002


def test_llama_3_lost_about_a_tenth() -> None:
    """419 interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, section 3.3.4), more than 90 % effective."""
    failures = Failures(54 * 24 * HOUR / 419, 10, 600)
    assert 0.90 <= goodput(failures, checkpoint_interval(failures)) <= 0.91


def test_free_checkpoints_lose_restarts_and_half_of_a_step() -> None:
    failures = Failures(10_000.0, 0.0, 500.0)
    assert checkpoint_interval(failures) == 0
    assert goodput(failures, 10.0) == pytest.approx(exp(-0.05) * (1 - 0.0005), rel=1e-5)


def test_a_checkpoint_longer_than_failures_apart_is_made_as_often_as_they_come() -> None:
    assert checkpoint_interval(Failures(100.0, 200.0, 0.0)) == 100.0
