"""The text about a given plan: its place, and the best plan's differences."""

from __future__ import annotations

from typing import Any

from schedc.report.explained import to_text
from support.plan_facts import plan_facts


def explained(**changes: Any) -> dict[str, Any]:
    return {
        "asked": "tp == 8, ep == 32", "axes": plan_facts(1)["axes"],
        "legal": True, "reason": "", "fits": True, "step_s": 18.2, "gap_pct": 2.5,
        "rank": 7, "needed_bytes": 49e9, "among": 10,
        "differs": {"ep": [32, 16], "overlap": [True, False]},
        "why": [{"what": "ideal", "seconds": 0.0}, {"what": "bubbles", "seconds": -0.2},
                {"what": "EP exposed", "seconds": 0.65}],
    } | changes  # fmt: skip


def test_a_plan_that_is_not_first() -> None:
    assert (
        "\n".join(to_text(explained()))
        == """\
the plan with tp == 8, ep == 32
  tp 8, cp 1, pp 16, vpp 2, ep 32, dp 48, zero 1, microbatch 1, microbatches 96, schedule
  interleaved_overlap, recompute layer chunk0, layout balanced, alltoall hier, overlap yes
takes 18.20 s and 49.0 GB: the 7th, 2.5 % longer than the best one
the best plan has ep 16, overlap no; the seconds between them:
  EP exposed                          +0.65 s
  bubbles                              -0.2 s"""
    )


def test_plans_that_are_first_or_too_large_or_not_there() -> None:
    first = list(to_text(explained(rank=1, differs={}, why=[])))
    assert first[3:] == ["takes 18.20 s and 49.0 GB: the best plan of the space"]
    behind = list(to_text(explained(rank=None)))
    assert behind[3] == "takes 18.20 s and 49.0 GB: behind the best 10, 2.5 % longer than the best one"
    large = list(to_text(explained(fits=False, reason="the least holds 70.0 GB")))
    assert large[1:] == ["fits into no device: the least holds 70.0 GB"]
    absent = list(to_text(explained(legal=False, reason="tp*cp*pp*dp is 6,000")))
    assert absent[1:] == ["is not in the space: tp*cp*pp*dp is 6,000"]
