"""Measures of a fit besides errors: the correlation of ranks, and the rows among which a planner chooses."""

from __future__ import annotations

import numpy as np
import pytest

from schedc.planner.fit.rows import load_rows
from schedc.planner.fit.validate import choices, spearman
from support.needs import needed
from support.paths import ROOT


def test_rank_correlation_is_that_of_scipy() -> None:
    stats = needed("scipy.stats")
    draw = np.random.default_rng(3)
    for _ in range(20):
        a, b = draw.integers(0, 6, 9).astype(float), draw.random(9)
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert spearman(np.ones(4), np.arange(4.0)) == 0.0


def test_rows_of_one_step_are_a_choice() -> None:
    rows = load_rows(ROOT / "benchmarks" / "published" / "zerobubble_t4.csv").rows
    groups = choices(rows, np.arange(len(rows)))
    assert groups
    for group in groups.values():
        assert len({(rows[row].run.model, rows[row].run.problem.sequences) for row in group}) == 1
        assert len({rows[row].run.axes.schedule for row in group}) > 1
