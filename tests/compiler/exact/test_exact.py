"""Verdicts about all costs, against every integer cost vector of a grid and against claims that were once believed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import lcm

import numpy as np
import pytest

from schedc.claims.check import check_claims
from schedc.elaborate import elaborate
from schedc.exact.space import Space
from schedc.exact.verdict import Facts, Verdict, decide_claim
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.syntax import tree
from support.claim_oracle import Grid, grid, in_domain, rank_variables, symbols_named, symbols_of, truth
from support.random_claims import Maker, features, parsed, programs
from support.random_schedules import random_schedule, with_recomputation
from support.sweeps import swept

CLAIMS, CLAIMS_EACH = swept((10_000, 20), (180, 6))


def facts_of(schedule: Schedule) -> Facts:
    known = Dependencies.of(schedule)
    memory = measure_memory(schedule, None, known)
    names = ("peak_activations", "peak_activations_between", "peak_pending_weight")
    counts = {name: [int(count) for count in getattr(memory, name)] for name in names}
    return Facts(known, counts | {"ops": np.diff(schedule.rank_start).tolist()})


def decided(claim: str | tree.Claim, facts: Facts) -> Verdict:
    claim = parsed(claim) if isinstance(claim, str) else claim
    return decide_claim(claim, facts, frozenset(symbols_named(claim)), frozenset(rank_variables(claim)))


@dataclass(eq=False)
class Oracle:
    """Judges verdicts about the claims of one schedule by the vectors of a grid; grids are kept by their symbols."""

    facts: Facts
    larger: np.random.Generator
    grids: dict[tuple[str, ...], Grid]

    def fault(self, claim: tree.Claim, verdict: Verdict) -> str:
        """What is wrong with a verdict; empty if nothing."""
        if verdict.refuted:
            vector, space = verdict.refuted.vector, verdict.space
            unit = vector[-1] if space.constant else 1
            costs = dict(zip(space.symbols, vector[: len(space.symbols)], strict=True))
            return self._not_refuted(claim, costs, unit) or self._not_shown(claim, space)
        variables, known = rank_variables(claim), self.facts.dependencies
        symbols = symbols_of(known, symbols_named(claim))
        if symbols not in self.grids:
            self.grids[symbols] = Grid(known, grid(symbols, self.larger))
        at = self.grids[symbols]
        applies = truth(claim.condition, at, variables)
        wrong = applies & ~truth(claim.claim, at, variables) if verdict.status == "proved" else applies
        if verdict.status == "open" or not wrong.any():
            return ""
        return f"{verdict.status}, but {at.vectors[int(np.argmax(wrong))]}"

    def _not_refuted(self, claim: tree.Claim, costs: dict[str, int], unit: int) -> str:
        """What is wrong with costs / unit as a counterexample: simulated, and compared exactly."""
        variables, known = rank_variables(claim), self.facts.dependencies
        if set(costs) != set(symbols_of(known, symbols_named(claim))) or not in_domain(costs):
            return f"refuted outside of the domain, at {costs}"
        at = Grid(known, [costs], unit)
        if not truth(claim.condition, at, variables).all():
            return f"refuted where the condition does not hold, at {costs} / {unit}"
        return f"refuted where it is true, at {costs} / {unit}" if truth(claim.claim, at, variables).all() else ""

    def _not_shown(self, claim: tree.Claim, space: Space) -> str:
        """What is wrong with the counterexample that people see."""
        (result,) = check_claims([claim], self.facts.schedule, dependencies=self.facts.dependencies)
        if result.status != "refuted" or result.counterexample is None:
            return f"refuted, but {result.status} for people"
        costs = {s: cost for s, cost in result.counterexample.costs.items() if s in space.symbols}
        shown = {s: Fraction(cost).limit_denominator(10**8) for s, cost in costs.items()}
        unit = lcm(*(cost.denominator for cost in shown.values()))
        return self._not_refuted(claim, {s: int(cost * unit) for s, cost in shown.items()}, unit)


@pytest.mark.slow
@pytest.mark.sweep
def test_random_claims_against_a_grid_of_costs() -> None:
    """Proved claims hold at every vector, refuting vectors refute, and no vector satisfies a vacuous condition."""
    statuses, seen, faults = Counter[str](), Counter[str](), []
    for number, schedule in enumerate(islice(programs(7), -(-CLAIMS // CLAIMS_EACH))):
        facts, draw = facts_of(schedule), random.Random(number)
        maker = Maker.of(schedule, draw)
        oracle = Oracle(facts, np.random.default_rng(number), {})
        seen.update(features(schedule))
        for _ in range(CLAIMS_EACH):
            text = maker.claim()
            claim = parsed(text)
            verdict = decided(claim, facts)
            statuses[verdict.status] += 1
            if fault := oracle.fault(claim, verdict):
                faults.append((number, schedule.name, schedule.sizes, text, fault))
    assert not faults
    assert min(statuses["proved"], statuses["refuted"], 3 * statuses["vacuous"]) > CLAIMS / 5, statuses
    assert statuses["open"] < CLAIMS / 30, statuses
    assert len(seen) == 4, seen


def test_the_oracle_sees_wrong_verdicts() -> None:
    """The grid finds what is wrong with a verdict of another claim: the check above can fail."""
    facts = facts_of(elaborate(open_schedule("zbh1"), {"P": 3, "M": 4}))
    oracle = Oracle(facts, np.random.default_rng(1), {})
    right = "bubble == (P-1)*(F + I - W) when W <= F and W <= I"
    wrong = "bubble == (P-1)*(F + I - W) when W <= F"
    proved, refuted = decided(right, facts), decided(wrong, facts)
    assert (proved.status, refuted.status) == ("proved", "refuted")
    assert "proved, but {" in oracle.fault(parsed(wrong), proved)
    assert "condition does not hold" in oracle.fault(parsed(right), refuted)
    assert "where it is true" in oracle.fault(parsed("bubble >= (P-1)*(F + I - W)"), refuted)
    assert "outside of the domain" in oracle.fault(parsed("bubble == p2p"), refuted)
    assert "vacuous, but {" in oracle.fault(parsed(right), decided("bubble == 0 when F < W and W < F", facts))


# Claims that samples of costs did not refute, and traps.


def at_sizes(name: str, **sizes: int) -> Facts:
    return facts_of(elaborate(open_schedule(name), sizes))


def refuting(text: str, facts: Facts) -> dict[str, float]:
    """The costs that refute a claim, confirmed."""
    verdict = decided(text, facts)
    assert verdict.refuted is not None, verdict
    assert Oracle(facts, np.random.default_rng(1), {}).fault(parsed(text), verdict) == ""
    return verdict.space.costs(verdict.refuted.vector)


def test_zbh2_needs_w_at_most_i() -> None:
    claim = "span_bubble == (P-1)*(F + I - 2*W)"
    facts = at_sizes("zbh2", P=4, M=8)
    assert decided(f"{claim} when W <= F and W <= I", facts).status == "proved"
    costs = refuting(f"{claim} when W <= F", facts)
    assert costs["W"] > costs["I"]


def test_a_whole_backward_is_not_i_plus_w_where_nothing_is_split() -> None:
    facts = at_sizes("1f1b", P=4, M=8)
    assert decided("bubble == (P-1)*(F+B)", facts).status == "proved"
    assert decided("bubble == (P-1)*(F+I+W) when B == I + W", facts).status == "proved"
    costs = refuting("bubble == (P-1)*(F+I+W)", facts)
    assert costs["B"] != costs["I"] + costs["W"]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev", "dualpipev_nosplit", "zbh1_late"])
def test_a_whole_backward_is_i_plus_w_where_others_are_split(name: str) -> None:
    facts = at_sizes(name, P=4, M=8)
    assert (facts.schedule.kind == OpKind.B).any()
    for claim in open_schedule(name).claims:
        assert decided(claim, facts).status == "proved"


def test_vhalf_at_a_border_that_random_costs_do_not_reach() -> None:
    """A piece that fitted 141 sizes: 251 for 257 at F=4 I=1 W=4."""
    claim = "bubble == F*(2*M + 2*P - 8) + I*(-2*M + 2*P - 1) + W*(2 - P)"
    facts = at_sizes("vhalf", P=14, M=32)
    refuting(f"{claim} when W <= F and I <= W and F <= I + W", facts)
    at = Grid(facts.dependencies, [{"F": 4, "I": 1, "W": 4}])
    assert at.metric("bubble", None).tolist() == [257]
    assert decided(f"{claim} when F == 4 and I == 1 and W == 4", facts).status == "refuted"
    assert decided(f"{claim} + 6 when F == 4 and I == 1 and W == 4", facts).status == "proved"


@pytest.mark.parametrize(
    ("name", "sizes", "costs", "bubble"),
    [
        ("vhalf", (4, 8), "F == 10 and I == 10 and W == 10 and p2p == 1", "bubble == 76"),
        ("dualpipe", (4, 8), "F == 10 and I == 10 and W == 12 and FB == 22 and p2p == 1", "span_bubble == 18"),
        ("dualpipev_nosplit", (8, 26), "F == 21 and I == 20 and W == 20 and FB == 61 and p2p == 2", "bubble == 687"),
        ("dualpipev", (2, 4), "F == 12 and I == 10 and W == 12 and FB == 22 and p2p == 1", "span_bubble == 16"),
    ],
)
def test_values_at_costs_where_fitted_formulas_were_wrong(
    name: str, sizes: tuple[int, int], costs: str, bubble: str
) -> None:
    facts = at_sizes(name, P=sizes[0], M=sizes[1])
    assert decided(f"{bubble} when {costs}", facts).status == "proved"
    assert decided(f"{bubble} - 1 when {costs}", facts).status == "refuted"


@pytest.mark.parametrize(
    "claim",
    [
        "bubble < (P-1)*(F + B) + F + p2p*100",
        "makespan > M*(F+B) + (P-1)*F",
        "bubble > (P-1)*F and bubble != (P-1)*B and not bubble <= (P-1)*F",
        "bubble != 2*B + p2p",
        "bubble + M*F < makespan and 2*F / makespan < bubble_ratio",
        "abs(bubble - (P-1)*F) > 0 when p2p == 0",
        "span_bubble < bubble + p2p when p2p > 0",
    ],
)
def test_costs_of_0_refute_no_strict_claim(claim: str) -> None:
    """Each is false where F, B or p2p is 0, which the domain or the condition excludes."""
    facts = at_sizes("1f1b", P=3, M=4)
    assert decided(claim, facts).status == "proved"
    limits = Grid(facts.dependencies, [{"F": F, "B": 1 - F, "p2p": p2p} for F in (0, 1) for p2p in (0, 1)])
    assert not truth(parsed(claim).claim, limits, []).all()


def test_a_latency_of_0_refutes_a_strict_claim() -> None:
    facts = at_sizes("1f1b", P=3, M=4)
    assert refuting("makespan > (M+P-1)*(F+B) + 0*p2p", facts)["p2p"] == 0
    assert decided("makespan > (M+P-1)*(F+B) when p2p > 0", facts).status == "proved"


@pytest.mark.parametrize(
    "condition",
    ["F < B and B < F", "F == 0", "p2p < 0", "F == B and F == 2*B", "bubble < 0", "bubble_ratio >= 1", "M > 9"],
)
def test_a_condition_that_no_costs_satisfy_proves_nothing(condition: str) -> None:
    assert decided(f"bubble == 0 when {condition}", at_sizes("1f1b", P=3, M=4)).status == "vacuous"


def test_decimals_are_what_is_written() -> None:
    facts = at_sizes("1f1b", P=2, M=4)
    assert decided("1000*bubble == 1001*F + 0.1*F + 1000*B when 1000*F == 1001.1*F", facts).status == "vacuous"
    assert decided("0.1*bubble + 0.2*bubble == 0.3*bubble", facts).status == "proved"
    costs = refuting("0.001*bubble <= 0.001*F + 0.001*B - 0.0000001", facts)
    assert set(costs) == {"F", "B"}


def test_costs_that_people_are_shown_are_in_the_domain() -> None:
    """FB < 2 leaves no whole numbers: those nearest to the refuting vector have FB < I + W."""
    facts = at_sizes("dualpipev", P=2, M=4)
    refuting("bubble > 41 + I when FB < 2", facts)
    (result,) = check_claims([parsed("bubble > 41 + I when FB < 2")], facts.schedule)
    assert result.counterexample is not None
    costs = result.counterexample.costs
    assert costs["I"] + costs["W"] <= costs["FB"] < 2


@pytest.mark.parametrize(
    ("claim", "status"),
    [
        ("bubble[5] == 0 when P > 7", "vacuous"),
        ("(bubble / (P-3) if P > 5 else bubble) == (P-1)*(F+B)", "proved"),
        ("bubble[max(0, P-9)] == bubble", "proved"),
        ("bubble[r] == bubble[min(r+1, P-1)]", "proved"),
        ("span_bubble[r] <= span_bubble[0 if r == 0 else r-1]", "proved"),
        ("span_bubble[r] < span_bubble[abs(r-1)]", "refuted"),
    ],
)
def test_what_only_sizes_and_ranks_decide_is_decided_first(claim: str, status: str) -> None:
    """Else the branch that is not taken has no value, and the rank seems to depend on costs."""
    assert decided(claim, at_sizes("1f1b", P=3, M=4)).status == status


def test_the_work_of_a_pair_with_an_input_gradient_is_not_linear() -> None:
    """max(FB - W, F, I): what a rank computes has three linear pieces, and its bubble counts each where it applies."""
    schedule = next(s for s in map(random_schedule, range(1000)) if s.ranks == 1 and "F & I" in features(s))
    facts = facts_of(schedule)
    for claim in (
        "bubble[r] == 0",
        "bubble == 0",
        "bubble_ratio == 0",
        "span_bubble[r] == 0",
        "span_bubble_ratio == 0",
    ):
        assert decided(claim, facts).status == "proved"
    again = facts_of(with_recomputation(schedule, 1))
    assert decided("bubble[0] <= 0 and span_bubble == 0 when R >= 2*F", again).status == "proved"
