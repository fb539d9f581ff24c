"""Derived formulas are the published ones, hold as claims at sizes far away, and are unknown where they are wrong."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from schedc.claims.check import check_claims
from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.formulas.cost_domains import spaces_of
from schedc.formulas.derive import DEFINITIONS, derive
from schedc.formulas.fit import LinearForm
from schedc.formulas.grid import FITTED, HELD_OUT, SizeGrid, columns, size_grid
from schedc.formulas.measure import TIMES, measured, times_at
from schedc.formulas.pieces import FailedPiece
from schedc.formulas.proof import DecidedSize, prove
from schedc.load.library import names, open_schedule
from schedc.report.formulas import to_json, to_text
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from schedc.syntax.parser import parse
from schedc.syntax.tree import ScheduleTree
from support.sweeps import halved, in_sweeps, swept

pytestmark = pytest.mark.slow

READ = {
    "1f1b": (40, 12), "zbh1": (40, 12), "zbh2": (40, 12),
    "interleaved_1f1b": (32, 8), "dualpipe": (32, 8), "zbv": (32, 8), "vmin": (24, 8),
    "zb_greedy": (6, 2),
}  # fmt: skip
"""Schedules of which these tests read single formulas, and how many sizes it takes to find and to prove these."""


@cache
def grid_of(name: str) -> SizeGrid:
    tree = open_schedule(name)
    return size_grid(tree, *swept((FITTED, HELD_OUT), READ.get(name, (14, 5))))


@cache
def facts(name: str) -> dict[str, Any]:
    return to_json(derive(open_schedule(name), grid=grid_of(name)))


def pieces(name: str, quantity: str, **wanted: Any) -> list[dict[str, Any]]:
    """The pieces of a quantity; ``latency`` and ``domain`` choose among those of the same name."""
    found = [
        q
        for q in facts(name)["quantities"]
        if q["quantity"] == quantity and all(q.get(key) == value for key, value in wanted.items())
    ]
    return found[0]["pieces"]  # type: ignore[no-any-return]


def equal(formula: str, expected: str) -> bool:
    """Whether two texts mean the same."""
    import sympy

    names = {name: sympy.Symbol(name) for name in ("P", "M", "v", "r", "F", "I", "W", "B", "FB", "p2p", "I")}
    rounds = {"((M - 2)//P)": "k"}
    for text, letter in rounds.items():
        formula, expected = formula.replace(text, letter), expected.replace(text, letter)
    first, second = (sympy.sympify(text, locals=names) for text in (formula, expected))
    return bool(sympy.expand(first - second) == 0)


# What the papers and the reference simulation say (the first piece is the one of typical costs: F = I > W).
PUBLISHED = [
    ("1f1b", "bubble", "(P-1)*(F+B)", set()),
    ("interleaved_1f1b", "bubble", "(P-1)*(F+B)", {"M >= P"}),
    ("zbh1", "bubble", "(P-1)*(F+I-W)", {"M >= P", "W <= F", "W <= I"}),
    ("zbh2", "span_bubble", "(P-1)*(F+I-2*W)", {"M >= 2*P", "W <= F", "2*W <= F + I"}),  # more than is published
    ("dualpipe", "bubble", "(P/2-1)*(FB+F-2*W)", {"W <= I", "I*(P - 2) <= F*P"}),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "quantity", "expected", "conditions"), halved(PUBLISHED), ids=lambda x: x if isinstance(x, str) else ""
)
def test_bubbles_are_the_published_ones(name: str, quantity: str, expected: str, conditions: set[str]) -> None:
    first = pieces(name, quantity, latency=False)[0]
    assert equal(first["formula"], expected), first
    assert set(first["conditions"]) <= conditions, first
    assert first["proved_sizes"] >= 30
    assert first["largest"]["P"] >= 16
    assert 0 < first["share"] <= 1


EQUAL = ["F > 0", "F == I", "I == W", "B == I + W", "p2p == 0"]


@in_sweeps("test_bubbles_are_the_published_ones")
def test_zbv_has_no_span_bubble_at_equal_costs() -> None:
    assert pieces("zbv", "span_bubble", domain=EQUAL)[0]["formula"] == "0"
    assert equal(pieces("zbv", "bubble", domain=EQUAL)[0]["formula"], "(P-1)*F")
    late = ["F > 0", "p2p >= 0", "10*p2p <= F", *EQUAL[1:4]]
    assert equal(pieces("zbv", "bubble", domain=late)[0]["formula"], "(P-1)*F + (5*P-7)*p2p")
    late_step = simulate(legal_schedule(open_schedule("zbv"), {"P": 4, "M": 9}), Costs(p2p=0.1))
    assert late_step.bubble == pytest.approx(3 + 13 * 0.1)


def test_every_time_of_zbv_is_known_for_many_microbatches() -> None:
    for latency, count in ((False, 8), (True, 10)):
        (bubble,) = (
            q
            for q in facts("zbv")["quantities"]
            if (q["quantity"], q.get("latency")) == ("bubble", latency) and "F == I" not in q["domain"]
        )
        assert bubble["complete"]
        assert ["M >= 2*P"] in bubble["complete_when"]
        assert sum("M >= 2*P" in piece["conditions"] for piece in bubble["pieces"]) == count


def test_latencies_are_those_of_the_zero_bubble_paper() -> None:
    # 1F1B: (P-1)(F+B) + [2(P-1)M/P + 2(P-2)]c where P divides M, where (M-2)//P = M/P - 1
    (one,) = pieces("1f1b", "bubble", latency=True)
    assert equal(one["formula"], "(P-1)*(F+B) + (2*M - 2*(((M - 2)//P) + 1) + 2*(P-2))*p2p")
    split = pieces("zbh1", "bubble", latency=True)[0]
    assert equal(split["formula"], "(P-1)*(F+I-W) + 4*(P-1)*p2p")


def test_dualpipes_latencies_follow_the_rounds_of_its_microbatches() -> None:
    found = pieces("dualpipe", "bubble", latency=True)
    for sizes in ({"P": 16, "M": 54}, {"P": 20, "M": 40}):
        P, M = sizes.values()
        schedule = legal_schedule(open_schedule("dualpipe"), sizes)
        costs = Costs(F=50.0, I=50.0, W=40.0, FB=130.0, p2p=2.0)
        said = 2 * (M - (M - 4) // P + 3 * P // 2 - 4) + (P - 2) * (50 + 130 - 80) // 2
        assert simulate(schedule, costs).bubble.max() == said
    assert "p2p*(-((M - 4)//P) + M + 3*P/2 - 4) + (P - 2)*(F + FB - 2*W)/2" in [piece["formula"] for piece in found]


@in_sweeps("test_bubbles_are_the_published_ones")
def test_v_mins_bubble_is_that_of_the_reference() -> None:
    """4P-7 chunk times where 3 divides P, else 4P-5."""
    (piece,) = pieces("vmin", "bubble", domain=EQUAL)
    assert piece["conditions"] == ["M >= P"]
    values = [eval(piece["formula"], {"P": P, "F": 1}) for P in range(3, 40)]
    assert values == [4 * P - (5 if P % 3 else 7) for P in range(3, 40)]


@pytest.mark.parametrize(
    ("name", "quantity", "formulas"),
    [
        ("1f1b", "peak_activations", ["min(P - r, M)"]),
        ("zbh1", "peak_activations", ["min(P, M)"]),
        ("zbh1", "peak_pending_weight", ["min(r + 1, M)"]),
        ("dualpipe", "peak_activations", ["P + 1"]),
        ("dualpipe", "peak_pending_weight", ["min(r, P - 1 - r) + 1"]),
        ("dualpipe", "peak_activations_between", ["P + 1", "P"]),
        ("1f1b", "messages_sent", ["M", "2*M", "M"]),
        ("1f1b", "messages", ["2*M*(P - 1)"]),
        ("zbv", "busiest_link", ["4*M"]),
        ("interleaved_1f1b", "peak_activations", ["min(P*v + P - 2*r - 1, M*v)"]),
        *swept([("vmin", "peak_activations", ["2*(((P + 1)//3) + 1)"])], []),
    ],
)
def test_counts(name: str, quantity: str, formulas: list[str]) -> None:
    assert [piece["formula"] for piece in pieces(name, quantity)] == formulas


def claims_of(name: str) -> ScheduleTree:
    """Every formula of a time as a claim of the language: the claim's condition is the domain and the conditions."""
    claims = [
        f"expect {q['quantity']} == {piece['formula']} when {' and '.join([*q['domain'], *piece['conditions']])}"
        for q in facts(name)["quantities"]
        if q["domain"]
        for piece in q["pieces"]
    ]
    tree = open_schedule(name)
    parameters = ", ".join(f"{p.name}: {p.role}" for p in tree.parameters)
    (tree,) = parse(Source("claims", f"schedule x({parameters}) {{\n" + "\n".join(claims) + "\n}")).schedules
    return tree


@pytest.mark.sweep
@pytest.mark.parametrize("name", swept(names(), ["zbh2", "zbv"]))
def test_every_formula_of_a_time_is_a_claim_that_is_proved_elsewhere(name: str) -> None:
    """At sizes outside of the fit, by the claims of the language; the full sweep has 200 of them of each schedule."""
    claims, tree = claims_of(name).claims, open_schedule(name)
    seen = {tuple(size.values.values()) for size in grid_of(name).fitted}
    rng = np.random.default_rng(len(name))
    proved = dict.fromkeys((claim.text for claim in claims), 0)
    left = swept(200, 6)
    while left:
        P = int(rng.integers(2, swept(18, 12)))
        sizes = {"P": P, "M": int(rng.integers(1, 5 * P))}
        sizes |= {p.name: int(rng.integers(1, 5)) for p in tree.parameters if p.role not in ("ranks", "microbatches")}
        if tuple(sizes.values()) in seen:
            continue
        try:
            schedule = legal_schedule(tree, sizes)
        except DiagnosticError:
            continue
        left -= 1
        for result in check_claims(claims, schedule):
            assert result.status in ("proved", "vacuous"), (
                sizes,
                result.claim,
                result.condition,
                result.counterexample,
            )
            proved[result.claim] += result.status == "proved"
    assert sum(map(bool, proved.values())) >= len(proved) // 3, proved


# What the report said before formulas were decided for all costs, and what the simulation gives.
FALSE = [
    ("vhalf", {"P": 14, "M": 32}, "bubble", {"F": 4, "I": 1, "W": 4}, 251, 257),
    ("vhalf", {"P": 4, "M": 8}, "bubble", {"F": 10, "I": 10, "W": 10, "p2p": 1}, 74, 76),
    ("dualpipe", {"P": 4, "M": 8}, "span_bubble", {"F": 10, "I": 10, "W": 12, "FB": 22, "p2p": 1}, 17, 18),
    ("dualpipev_nosplit", {"P": 8, "M": 26}, "bubble", {"F": 21, "I": 20, "W": 20, "FB": 61, "p2p": 2}, 686, 687),
    ("dualpipev", {"P": 2, "M": 4}, "span_bubble", {"F": 12, "I": 10, "W": 12, "FB": 22, "p2p": 1}, 14, 16),
]


@pytest.mark.parametrize(("name", "sizes", "quantity", "values", "said", "truth"), FALSE, ids=lambda x: str(x)[:12])
def test_no_printed_piece_says_what_was_false(
    name: str, sizes: dict[str, int], quantity: str, values: dict[str, int], said: float, truth: float
) -> None:
    cells = Dependencies.of(legal_schedule(open_schedule(name), sizes))
    space = spaces_of([cells])[2 if "p2p" in values else 0]
    times = times_at(cells, space)
    assert times is not None
    assert times.values(TIMES[quantity], [tuple(values[s] for s in space.symbols)]) == [truth]
    known = measured(times, space, TIMES[quantity], most=100)
    assert known is not None
    assert known.value(tuple(values[s] for s in space.symbols)) == truth != said


@pytest.mark.sweep
@pytest.mark.parametrize("name", swept(names(), ["1f1b", "zbh1", "zbh2", "zbv", "zb_greedy", "hanayo"]))
def test_the_report_of_every_schedule_is_made(name: str) -> None:
    """Here of fewer sizes than the command looks at; what it says of them is proved all the same."""
    report = facts(name)
    assert {q["quantity"] for q in report["quantities"]} == set(DEFINITIONS)
    for quantity in report["quantities"]:
        for piece in quantity["pieces"]:
            assert {"formula", "conditions", "proved_sizes", "largest", "share"} <= piece.keys()
        for unknown in quantity["unknown"]:
            assert (unknown["counterexample"] is None) == bool(unknown.get("untried"))
        assert quantity["complete"] or quantity["example"] or quantity["why"] or quantity["pieces"]
    assert report["schedule"] in to_text(report)


def tree_of(body: str, sizes: str = "P: ranks = 4, M: microbatches = 8") -> ScheduleTree:
    (tree,) = parse(Source("x.sched", f"schedule x({sizes}) {{\n{body}\n}}")).schedules
    return tree


def test_too_few_sizes_is_a_finding_and_an_illegal_schedule_its_own() -> None:
    rank = "rank r { phase f repeat M { F } phase b repeat M { B } }"
    with pytest.raises(DiagnosticError) as few:
        derive(tree_of(f"require P == 3, M < 5\nplace linear\n{rank}"))
    assert [d.position for d in few.value.diagnostics] == [("S503", 1, 10)]
    with pytest.raises(DiagnosticError) as broken:
        derive(tree_of("place linear\nrank r { phase f repeat M { F } phase b repeat M + 1 { B } }"))
    assert [d.position for d in broken.value.diagnostics] == [("S118", 3, 56)]


def test_what_no_formula_of_ours_describes_is_unknown() -> None:
    """The first k microbatches run alone; k jumps about with M, so no quasi-polynomial gives the peak."""
    tree = tree_of(
        "let k = min(1 + M*M*M % 5, M)\nplace linear\nrank r {\n"
        "phase a repeat k { F } phase b repeat k { B } phase c repeat M-k { F } phase d repeat M-k { B } }"
    )
    report = to_json(derive(tree))
    (peaks,) = (q for q in report["quantities"] if q["quantity"] == "peak_activations")
    assert (peaks["pieces"], peaks["complete"]) == ([], False)
    example = peaks["example"]
    schedule = legal_schedule(tree, {name: example["sizes"][name] for name in ("P", "M")})
    measured = measure_memory(schedule).peak_activations
    assert measured.max() == example["simulated"]
    assert f"not known at all, such as {example['simulated']:g} at" in to_text(report)


def test_what_few_ranks_allow_is_not_taken_for_a_formula() -> None:
    """Parabolas go through three numbers of ranks, whatever the values: this order knows no more than four of them."""
    bumps = "let e = (P % 4 == 3) + 2*(P == 4)"
    tree = tree_of(
        f"require P >= 2, P <= 4\n{bumps}\nplace linear\nrank r {{\n"
        "let w = min(P-1-r + e, M) phase a repeat w { F } phase b repeat M-w { F B } phase c repeat w { B } }"
    )
    report = to_json(derive(tree))
    for quantity in report["quantities"]:
        for piece in quantity["pieces"]:
            if piece["conditions"][:1] != ["P == 2"]:
                assert "P" not in piece["formula"], (quantity["quantity"], piece)
    assert "fits, but was not proved with P > 4, and not fitted there" in to_text(report)


def test_what_an_order_rests_on_is_said() -> None:
    assert (facts("zb_greedy")["order"], facts("1f1b")["order"]) == ("unit costs", None)
    assert "all of the order for unit costs" in to_text(facts("zb_greedy"))


def test_a_formula_that_is_not_kept_comes_with_a_true_counterexample() -> None:
    """Some pieces of ZB-H2 with latency fit at small sizes and fail at a few larger ones."""
    refuted = [
        (quantity, unknown)
        for quantity in facts("zbh2")["quantities"]
        if quantity["domain"]
        for unknown in quantity["unknown"]
        if unknown["counterexample"]
    ]
    for quantity, unknown in refuted:
        example = unknown["counterexample"]
        costs = Costs(**{key: float(value) for key, value in example["costs"].items()})  # type: ignore[arg-type]
        schedule = legal_schedule(open_schedule("zbh2"), example["sizes"])
        measured = getattr(simulate(schedule, costs), quantity["quantity"]).max()
        assert measured == pytest.approx(example["simulated"], rel=1e-4)
        assert example["simulated"] != example["formula"]
    assert refuted
    assert "not kept:" in to_text(facts("zbh2"))


def test_what_the_seconds_leave_undecided_is_named() -> None:
    derivation = derive(open_schedule("zbh1"), grid=grid_of("zbh1"), seconds=0.0)
    assert all("left undecided" in result.why for result in derivation.times)
    assert all(result.pieces for result in derivation.counts)  # counts take a second, and are always there


def test_a_form_above_the_time_is_no_piece() -> None:
    """No costs meet the conditions of the piece. The known pieces and a decision both refuse its form."""
    grid = grid_of("zbh1")
    piece, space = derive(open_schedule("zbh1"), grid=grid).times[0].pieces[0], spaces_of([grid.fitted[0].cells])[0]
    table, zero = columns(grid.fitted, grid.names), LinearForm((), piece.form.width)
    never = zero.minus(LinearForm((((), (Fraction(1),) * zero.width),), zero.width))
    twice = piece.form.minus(zero.minus(piece.form))
    row = int(np.flatnonzero(piece.region.of(table, grid.names))[0])
    times = times_at(grid.fitted[row].cells, space)
    assert times is not None
    for known in (None, measured(times, space, TIMES["bubble"], most=40)):
        sizes = [DecidedSize(table, row, space, times, TIMES["bubble"], known)]
        outcome = prove(replace(piece, form=twice, conditions=(never,)), sizes, table, grid.names)
        assert isinstance(outcome, FailedPiece)
        assert outcome.said > outcome.measured
        assert prove(replace(piece, conditions=(never,)), sizes, table, grid.names) is None
