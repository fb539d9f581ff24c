"""Which method of exchange a plan gets, and what a report says methods are compared by."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedc.compiler import analyse
from schedc.plan import Method, plan_of
from schedc.report.check import to_json as report
from support.plan_cases import written


def test_an_unknown_topology_leaves_the_choice_to_the_runtime(tmp_path: Path) -> None:
    analysis = analyse(written(tmp_path, "layers 4 experts 64 top 8 alltoall auto"), {})
    assert plan_of(analysis.schedule).method is Method.AUTO
    assert "when the ranks are known" in report(analysis)["plan"]["alltoall"]["why"]


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        ("1 x 4", "`topology` says no speeds of links"),
        ("4 x 4", "`topology` says no speeds of links"),
        (
            "1 x 4 rail 50 GB/s node 400 GB/s",
            "by the rows expected, at the speeds of `topology`, hierarchical is better",
        ),
    ],
)
def test_what_methods_are_compared_by_is_said(tmp_path: Path, topology: str, why: str) -> None:
    method = "hierarchical" if topology == "1 x 4" else "flat"
    lines = f"layers 4 experts 64 top 8 topology nodes {topology} alltoall {method}"
    assert why in report(analyse(written(tmp_path, lines), {}))["plan"]["alltoall"]["why"]
