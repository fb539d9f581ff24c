"""Runs in other layouts: a few of the cases of `python benchmarks/resilience.py resume`, each with another feature."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.resumed_runs import Layout, chain
from support.sweeps import in_sweeps, swept

CHAINS = [
    (Layout("sharded", "zbv", 2, 1, 2, size=4), Layout("sharded", "dualpipev", 1, 1, 4, size=4)),
    (Layout("hot", "1f1b", 2, 2, 1, size=3), Layout("hot", "zbv", 1, size=3)),
    (Layout("tied", "dualpipev", 2, size=4), Layout("tied", "1f1b", 4, size=4)),
]
"""On four ranks: the layout that trains, and the one that loads the state of the first."""


@in_sweeps(
    "runtime/keeper/test_checkpoints.py::test_a_run_goes_on_with_the_same_bits",
    "runtime/trainers/test_checkpoint.py::test_another_number_of_ranks_goes_on_with_the_same_bits",
)
@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "other"), swept(CHAINS, CHAINS[2:]), ids=lambda layout: layout.feature)
def test_runs_go_on_in_their_layout_and_in_another(layout: Layout, other: Layout, tmp_path: Path) -> None:
    outcomes = list(chain(layout, other, tmp_path))
    assert [source for source, _, _ in outcomes] == ["memory", "disk", "another layout"]
    assert [(source, why) for source, why, _ in outcomes if why] == []
