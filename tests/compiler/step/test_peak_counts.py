"""Peaks of many costs by counts: the same as those of each alone, and as few rows as the order allows."""

from __future__ import annotations

import numpy as np
import pytest

from schedc.diagnostics import CompilerBug
from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.peak_counts import PeakCounts
from support.random_schedules import random_schedule, with_recomputation

FIELDS = ("activation", "pending_weight", "recomputed", "restored")


def agrees(schedule: Schedule, seed: int, fields: int = 4) -> None:
    """Compares the peaks of five random costs, in the first ``fields`` of them, with those of each cost alone."""
    dependencies = Dependencies.of(schedule)
    sizes = np.random.default_rng(seed).uniform(0, 3, (fields, 5, schedule.stages))
    peaks = PeakCounts.of(dependencies).peaks(*sizes)
    assert peaks.shape == (schedule.ranks, 5)
    for number, cost in enumerate(sizes.transpose(1, 0, 2)):
        alone = Costs(**dict(zip(FIELDS, map(tuple, cost.tolist()), strict=False)))  # type: ignore[arg-type]
        expected = measure_memory(schedule, alone, dependencies).peak_memory
        assert peaks[:, number] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_peaks_of_many_costs_are_those_of_each_alone(seed: int) -> None:
    """On random orders, some with an R, pairs, ranks without stages and two pipes."""
    schedule = random_schedule(seed)
    agrees(with_recomputation(schedule, seed) if seed % 2 else schedule, seed, fields=2 + seed // 2 % 3)


@pytest.mark.parametrize("name", ["interleaved_overlap", "zbv", "dualpipe", "zbh1_overlap", "vmin", "seq1f1b"])
def test_peaks_of_the_library(name: str) -> None:
    agrees(elaborate(open_schedule(name), {"P": 4, "M": 16}), 1)


@pytest.mark.parametrize(
    ("name", "rows"), [("1f1b", 1), ("interleaved_overlap", 17), ("dualpipev", 17), ("zbv", 34), ("gpipe", 1)]
)
def test_rows_are_few(name: str, rows: int) -> None:
    counts = PeakCounts.of(Dependencies.of(elaborate(open_schedule(name), {"P": 16, "M": 128})))
    assert max(len(rank.counts) for rank in counts.ranks) == rows


def test_activations_of_another_number_of_stages_are_our_fault() -> None:
    counts = PeakCounts.of(Dependencies.of(elaborate(open_schedule("1f1b"), {"P": 4, "M": 8})))
    with pytest.raises(CompilerBug, match=r"activations \(2, 3\) for 4 stages"):
        counts.peaks(np.ones((2, 3)), np.ones((2, 3)))
