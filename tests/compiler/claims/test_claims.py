"""Claims: the library's hold at every size; a wrong one gets its first counterexample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from schedc.claims.check import VECTORS, ClaimResult, check_claims
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.legality import check_schedule
from schedc.syntax.parser import parse
from schedc.syntax.tree import ScheduleTree
from support.sweeps import in_sweeps

GPIPE = """sched 1
schedule g(P: ranks = 3, M: microbatches = 5) {
  place linear
  rank r { phase warmup repeat M { F }  phase drain repeat M { B } }
  expect %s
}
"""
OVERLAP = """sched 1
schedule overlap(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r {
    phase warmup repeat 2*(P-1-r) + 1 { F }
    phase steady repeat M - 2*(P-1-r) - 1 { F & B }
    phase drain  repeat 2*(P-1-r) + 1 { B }
  }
  expect %s
}
"""


def check(claim: str, costs: Costs | None = None, file: str = GPIPE) -> ClaimResult:
    tree = parse(Source("g.sched", file % claim)).schedules[0]
    (result,) = check_claims(tree.claims, elaborate(tree, {}), costs)
    return result


@pytest.mark.parametrize(
    "claim",
    [
        "bubble == (P-1)*(F+B)",
        "bubble[r] == (P-1)*(F + B)",
        "makespan == (M+P-1)*(F+B)",
        "bubble_ratio == (P-1)/(M+P-1)",
        "bubble_ratio < 0.3 and not bubble_ratio < 0.2",
        "span_bubble[r] == (P-1-r)*(F+B)",
        "span_bubble_ratio == (P-1)/(M+P-1)",
        "makespan == (M+P-1)*(F+B) + 2*(P-1)*p2p",
        "peak_activations[r] == M",
        "peak_activations == peak_activations_between",
        "ops == 2*M and peak_pending_weight == 0",
        "bubble == (0 if F + B < F else 1)*(P-1)*max(F+B, F)",
        "bubble != 0 or P == 1",
        "bubble <= 0.5*makespan",
        "bubble/makespan == (P-1)/(M+P-1)",
        "abs(bubble - makespan) == M*(F+B) and min(F, B) < max(F, B) + 0.001",
    ],
)
def test_true_claims_are_proved(claim: str) -> None:
    result = check(claim)
    assert (result.status, result.holds, result.applies, result.diagnostic) == ("proved", True, True, None)
    latency = "p2p >= 0" if "p2p" in claim else "p2p == 0"
    assert result.domain == (() if claim.startswith(("peak", "ops")) else ("F > 0", "B > 0", latency))


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ("bubble*F >= 0", "a product of costs"),
        ("bubble_ratio >= F - F*B/B", "a product of costs"),
        ("bubble <= makespan*makespan/F", "a product of costs"),
        ("bubble // F >= 0", "a division of costs without its remainder, or the remainder"),
        ("bubble_ratio <= F + B", "a ratio beside costs"),
    ],
)
def test_what_cannot_be_decided_is_tried_and_says_why(claim: str, why: str) -> None:
    result = check(claim)
    assert (result.status, result.why, result.tested) == ("tried", f"not decidable: {why}", VECTORS)
    refuted = check(f"not ({claim})")
    assert (refuted.status, refuted.why) == ("refuted", "")


def test_the_first_counterexample_is_shown() -> None:
    result = check("bubble == (P-1)*(F+B) + I - W")
    assert result.holds is False
    assert result.counterexample is not None
    assert result.diagnostic is not None
    assert result.diagnostic.position == ("S501", 5, 3)
    example = result.counterexample
    assert example.costs == {"F": 1, "I": 1, "W": 2, "B": 1}
    assert (example.left, example.right) == (4, 3)
    assert "counterexample: F = 1, I = 1, W = 2, B = 1 at P = 3, M = 5" in result.diagnostic.notes
    assert result.to_json()["counterexample"]["left"] == 4


def test_a_claim_about_every_rank_names_the_rank_that_breaks_it() -> None:
    result = check("peak_activations[r] == M and span_bubble[r] <= (F+B)*(P-1) - (F+B)*(r == 1) * 2")
    assert result.counterexample is not None
    assert (result.counterexample.rank, result.counterexample.left) == (1, 3)
    assert result.counterexample.right == 0


@pytest.mark.parametrize(
    ("claim", "costs", "why"),
    [
        ("bubble == (P-1)*(F+B)", Costs(F=(1.0, 2.0, 1.0)), "the given costs differ between stages"),
        ("bubble == (P-1)*(F+B)", Costs(p2p=1), "it speaks of p2p = 0"),
        ("bubble == (P-1)*(F+B)", Costs(FB=9), "it speaks of an FB between max(F, B) and F + B"),
        ("bubble == (P-1)*(F+B) when F == I", Costs(F=2), "the condition does not hold at these costs"),
    ],
)
def test_where_a_claim_does_not_speak_of_the_given_costs(claim: str, costs: Costs, why: str) -> None:
    result = check(claim, costs)
    assert (result.status, result.applies, result.aside) == ("proved", False, why)


def test_a_claim_of_a_split_backward_speaks_of_one_that_takes_both_times() -> None:
    file = GPIPE.replace("{ B }", "{ I  W }")
    for B, why in ((5.0, "it speaks of B = I + W"), (4.0, "it speaks of B = I + W"), (4.5, ""), (None, "")):
        result = check("makespan >= M*(F + I + W)", Costs(I=2.5, W=2.0, B=B), file)
        assert (result.status, result.applies, result.aside) == ("proved", not why, why)
    assert check("makespan >= M*(F + B)", Costs(B=5)).applies  # nothing is split


def test_the_given_costs_are_looked_at_too() -> None:
    assert check("makespan < 10000").status == "refuted"
    result = check("makespan < 10000", Costs(F=5000.5))
    assert (result.holds, result.applies) == (False, True)
    assert result.counterexample is not None
    assert result.counterexample.costs["F"] == 5000.5
    assert check("bubble == (P-1)*(F+B)", Costs(F=0.1, I=0.2, W=0.7)).applies
    nothing = check("bubble > 0", Costs(F=0, I=0, W=0))  # proved for all costs, which are greater than 0
    assert (nothing.status, nothing.applies, check("bubble > 0").status) == ("refuted", True, "proved")


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("M > 100", "the condition does not hold at this size"),
        ("F > 100*I and 2*F < I", "no costs satisfy the condition at this size"),
        ("makespan < F", "no costs satisfy the condition at this size"),
    ],
)
def test_a_claim_that_nothing_satisfies_says_so(condition: str, why: str) -> None:
    result = check(f"bubble == 0 when {condition}")
    assert (result.status, result.holds, result.why) == ("vacuous", None, why)


def test_a_claim_without_a_value() -> None:
    result = check("bubble == F/(P-3)")
    assert result.diagnostic is not None
    assert result.diagnostic.position == ("S502", 5, 20)


def test_pairs_may_take_anything_between_full_overlap_and_none() -> None:
    serial = "(P-1)*(F+B) + (P-1)*(F+B)"
    assert check(f"bubble == {serial}", file=OVERLAP).holds is False
    total = "bubble[r] <= (P-1)*(F+B) + 0*FB"
    assert check(total, file=OVERLAP).holds is True
    # the total of the authors of combined 1F1B, with one chunk: (P-1)(F+B) + (F+B) + (M-1) FB
    assert check("makespan == (P-1)*(F+B) + (F+B) + (M-1)*FB", file=OVERLAP).holds is True


def sizes(tree: ScheduleTree) -> Iterator[Schedule]:
    """The schedule at all of many sizes that its `require` allows."""
    for P in (1, 2, 3, 4, 6):
        for M in (1, 2, 3, 4, 7, 8, 12, 18):
            with suppress(DiagnosticError):
                yield elaborate(tree, {"P": P, "M": M})


@in_sweeps("project/test_library_orders.py::test_every_legal_size_is_complete_and_its_claims_hold")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbh1", "zbv", "dualpipe", "dualpipev"])
def test_the_library_keeps_its_claims_at_every_size(name: str) -> None:
    tree = open_schedule(name)
    proved = dict.fromkeys((claim.text for claim in tree.claims), 0)
    for schedule in sizes(tree):
        assert check_schedule(schedule) == []
        for result in check_claims(tree.claims, schedule):
            assert result.status in ("proved", "vacuous"), (schedule.sizes, replace(result, diagnostic=None))
            proved[result.claim] += result.status == "proved"
    assert all(proved.values()), proved


def test_a_policy_is_proved_for_its_order_only() -> None:
    tree = open_schedule("zb_greedy")
    results = check_claims(tree.claims, elaborate(tree, {}), follows_costs=True)
    assert {result.status for result in results} == {"order"}


@pytest.mark.parametrize(
    ("given", "tested"),
    [({"p2p": 1.0}, [0, 0]), ({"F": 2.0, "I": 1.0, "W": 1.0}, [0, 1]), ({"F": 1.0, "I": 1.0, "W": 1.0}, [])],
)
def test_an_order_of_other_costs_refutes_no_policy(given: dict[str, float], tested: list[int]) -> None:
    """At F = I = W and no latency the policy would choose another order, of which the claims speak."""
    results = analyse("zb_auto", {"P": 6, "M": 8, "limit": 8}, Costs(**given)).claims
    tried = [result for result in results if result.status == "tried"]
    assert [result.tested for result in tried] == tested
    assert all("another order" in result.why and result.diagnostic is None for result in tried)
    assert not [result for result in results if result.status == "refuted"]
