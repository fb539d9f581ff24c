"""Steps as graphs have the bits of steps without, and what no graph can hold is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from support.capture_cases import SMALL, pipeline
from support.graph_cases import differing, dropped, trained, with_graphs, zeroed_or_dropped

STEPS = 7


@pytest.mark.parametrize(
    ("kind", "schedule", "sizes", "between"),
    [
        ("dense", "zbv", SMALL, zeroed_or_dropped),
        ("dense", "interleaved_1f1b", None, dropped),
        ("dense", "dualpipe", None, zeroed_or_dropped),
        ("chunked", "zbh1", None, dropped),
        ("padded", "dualpipev", SMALL, zeroed_or_dropped),
    ],
)
def test_replayed_steps_have_the_same_bits(kind: str, schedule: str, sizes: Any, between: Any) -> None:
    """V, looped and bidirectional programs: losses, gradients of every step, state and counts of layers."""
    pipe = with_graphs(kind, schedule, sizes)
    values = trained(pipe, STEPS, between)
    assert differing(trained(pipeline(kind, schedule, sizes), STEPS, between), values) == []
    (line,) = [line for line in pipe.report().splitlines() if line.startswith("graphs:")]
    assert line in ("graphs: 1 of whole steps, replayed 2 times", "graphs: 1 of whole steps, replayed 3 times")
