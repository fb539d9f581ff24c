"""A copy of an expert takes as long as its bytes take on the links that carry it."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedc.plan.counts.copy_times import copy_time
from support.copied_plans import CELLS, LINES, analysed, routed

OVER_NODES = CELLS.replace("node = 6", "rail = 6")
ROWS = 48
"""Rows of as many bytes as the weights of an expert: three matrices of 16 columns."""


@pytest.mark.parametrize("line", ["  balance by step", "  balance by microbatch"])
def test_copies_inside_a_node_take_its_speed_beside_rows_of_one_hop(tmp_path: Path, line: str) -> None:
    """Three quarters of 128 rows take 6 on the rail, and links of a node are eight times as fast."""
    speeds = "topology nodes 2 x 2 rail 50 GB/s node 400 GB/s"
    lines = LINES.replace("topology nodes 1 x 4 node 400 GB/s", speeds)
    step = analysed(tmp_path, routed(), line, cells=OVER_NODES, lines=lines)
    assert step.costs.cell is not None
    time = copy_time(step.plan, step.costs.cell.costs)
    assert time is not None
    assert time.forward == pytest.approx(6 / 96 * ROWS / 8)
    assert time.input_gradient == pytest.approx(2 * time.forward)
    for unknown in ("topology nodes 2 x 2", "topology nodes 2 x 2 node 400 GB/s"):
        other = analysed(tmp_path, routed(), line, cells=OVER_NODES, lines=lines.replace(speeds, unknown))
        assert copy_time(other.plan, step.costs.cell.costs) is None
