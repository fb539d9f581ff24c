"""Derived formulas are the published ones, hold as claims at sizes far away, and are unknown where they are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.analysis.claims import check_claims
from schedc.analysis.dependencies import Dependencies
from schedc.analysis.formulas.counts import RANK, find_counts
from schedc.analysis.formulas.derive import derive
from schedc.analysis.formulas.domains import Domain
from schedc.analysis.formulas.fit import Form, families, fit, monomial_values, size_atom
from schedc.analysis.formulas.measure import linear_forms
from schedc.analysis.formulas.pieces import Failure, Piece, Samples, verify_piece
from schedc.analysis.formulas.regions import REGIONS
from schedc.analysis.formulas.report import to_json, to_text
from schedc.analysis.memory import measure_memory
from schedc.analysis.timeline import simulate
from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.cost.costs import Costs
from schedc.diagnostics import DiagnosticError
from schedc.library import open_schedule
from schedc.source import Source
from schedc.syntax.parser import parse
from schedc.syntax.tree import ScheduleTree


@cache
def facts(name: str) -> dict[str, Any]:
    return to_json(derive(open_schedule(name)))


def pieces(name: str, quantity: str, **wanted: Any) -> list[dict[str, Any]]:
    """The pieces of a quantity; ``latency`` and ``costs`` choose among those of the same name."""
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
    ("dualpipe", "bubble", "(P/2-1)*(FB+F-2*W)", {"W <= I", "I*(P - 2) <= F*P"}),
]


@pytest.mark.parametrize(("name", "quantity", "expected", "conditions"), PUBLISHED, ids=lambda x: str(x)[:20])
def test_bubbles_are_the_published_ones(name: str, quantity: str, expected: str, conditions: set[str]) -> None:
    first = pieces(name, quantity, latency=False)[0]
    assert equal(first["formula"], expected), first
    assert set(first["when"]) <= conditions, first
    assert first["tested"] >= 30


def test_zbv_has_no_span_bubble_at_equal_costs() -> None:
    costs = ["F == I, I == W"]
    assert pieces("zbv", "span_bubble", costs=costs)[0]["formula"] == "0"
    assert equal(pieces("zbv", "bubble", costs=costs)[0]["formula"], "(P-1)*F")


def test_latencies_are_those_of_the_zero_bubble_paper() -> None:
    # 1F1B: (P-1)(F+B) + [2(P-1)M/P + 2(P-2)]c where P divides M, where (M-2)//P = M/P - 1
    (one,) = pieces("1f1b", "bubble", latency=True)
    assert equal(one["formula"], "(P-1)*(F+B) + (2*M - 2*(((M - 2)//P) + 1) + 2*(P-2))*p2p")
    split = pieces("zbh1", "bubble", latency=True)[0]
    assert equal(split["formula"], "(P-1)*(F+I-W) + 4*(P-1)*p2p")


def test_dualpipes_latencies_follow_the_rounds_of_its_microbatches() -> None:
    found = pieces("dualpipe", "bubble", latency=True)
    assert len(found) == 4
    for sizes in ({"P": 16, "M": 54}, {"P": 20, "M": 40}):
        P, M = sizes.values()
        schedule = legal_schedule(open_schedule("dualpipe"), sizes)
        costs = Costs(F=50.0, I=50.0, W=40.0, FB=130.0, p2p=2.0)
        said = 2 * (M - (M - 4) // P + 3 * P // 2 - 4) + (P - 2) * (50 + 130 - 80) // 2
        assert simulate(schedule, costs).bubble.max() == said
    assert found[0]["formula"] == "p2p*(-((M - 4)//P) + M + 3*P/2 - 4) + (P - 2)*(F + FB - 2*W)/2"


def test_v_mins_bubble_is_that_of_the_reference() -> None:
    """4P-7 chunk times where 3 divides P, else 4P-5."""
    (piece,) = pieces("vmin", "bubble", costs=["F == I, I == W"])
    assert piece["when"] == ["M >= P"]
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
        ("vmin", "peak_activations", ["2*(((P + 1)//3) + 1)"]),
    ],
)
def test_counts(name: str, quantity: str, formulas: list[str]) -> None:
    assert [piece["formula"] for piece in pieces(name, quantity)] == formulas


def test_every_formula_of_a_time_is_a_claim_that_holds_far_away() -> None:
    """An independent check: by the claims of the language, at a size beyond every one that formulas come from."""
    for name, sizes in (("zbh1", {"P": 19, "M": 47}), ("dualpipe", {"P": 18, "M": 44}), ("zbv", {"P": 17, "M": 40})):
        schedule = legal_schedule(open_schedule(name), sizes)
        claims = [
            f"expect {q['quantity']} == {piece['formula']} when {' and '.join([*costs(q), *piece['when']]) or '1 == 1'}"
            for q in facts(name)["quantities"]
            if q.get("latency") is False
            for piece in q["pieces"]
        ]
        text = "schedule x(P: ranks, M: microbatches) {\n" + "\n".join(claims) + "\n}"
        (tree,) = parse(Source("claims", text)).schedules
        results = check_claims(tree.claims, schedule)
        assert [r.claim for r in results if r.holds is False] == []
        assert sum(r.holds is True for r in results) >= 4


def costs(quantity: dict[str, Any]) -> list[str]:
    return [part for text in quantity["costs"] for part in text.split(", ")]


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
    assert f"unknown: no formula of the kinds tried gives it, such as {example['simulated']:g} at" in to_text(report)


def test_whatever_is_unknown_comes_with_a_value_or_a_reason() -> None:
    for name in ("zbv", "vmin", "zb_greedy", "looped_bfs"):
        for quantity in facts(name)["quantities"]:
            assert quantity["complete"] == (quantity["example"] is None), (name, quantity["quantity"])
            for unknown in quantity["unknown"]:
                assert (unknown["counterexample"] is None) == bool(unknown.get("untried"))


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
            if piece["when"][:1] != ["P == 2"]:
                assert "P" not in piece["formula"], (quantity["quantity"], piece)
    assert "fits, but was not tried with P > 4, and not fitted there" in to_text(report)


def test_what_an_order_rests_on_is_said() -> None:
    assert (facts("zb_greedy")["order"], facts("1f1b")["order"]) == ("unit costs", None)
    assert "all of the order for unit costs" in to_text(facts("zb_greedy"))


def test_a_refuted_formula_comes_with_a_true_counterexample() -> None:
    """ZB-V has regimes that depend on sizes and costs together; what the fit got wrong there is told, not printed."""
    refuted = [
        (q, u)
        for q in facts("zbv")["quantities"]
        if q.get("latency") is False
        for u in q["unknown"]
        if q["costs"] == []
    ]
    assert refuted
    for quantity, unknown in refuted:
        example = unknown["counterexample"]
        assert unknown["formula"] not in [p["formula"] for p in quantity["pieces"]]
        values = {key: float(value) for key, value in example["costs"].items()}
        schedule = legal_schedule(open_schedule("zbv"), example["sizes"])
        measured = getattr(simulate(schedule, Costs(**values)), quantity["quantity"]).max()  # type: ignore[arg-type]
        assert measured == example["simulated"] != example["formula"]
    assert "unknown:" in to_text(facts("zbv"))


# The parts.


def test_a_wrong_formula_is_refuted_with_a_counterexample() -> None:
    one, P = Fraction(1), size_atom("P")
    wrong = Form((((P,), (one, one)),))  # P (F + B), for gpipe's (P - 1)(F + B)
    domain = Domain(("F", "B"))
    vectors = domain.vectors(np.random.default_rng(1), 40)
    cells = [Dependencies.of(legal_schedule(open_schedule("gpipe"), {"P": p, "M": 4})) for p in (2, 3)]
    found = [linear_forms(c, domain, vectors)["bubble"] for c in cells]
    table = {"P": np.array([2, 3]), "M": np.array([4, 4])}
    stacked = (np.stack([getattr(f, name) for f in found]) for name in ("values", "even", "forms", "exact"))
    samples = Samples(table, vectors, *stacked)
    outcome = verify_piece(Piece(wrong, REGIONS[0], (), True, 1.0), samples, domain, "P", "M")
    assert isinstance(outcome, Failure)
    assert outcome.sizes == {"P": 2, "M": 4}
    F, B = outcome.costs["F"], outcome.costs["B"]
    assert (outcome.said, outcome.measured) == (2 * (F + B), F + B)
    right = Form((((P,), (one, one)), ((), (-one, -one))))
    assert isinstance(verify_piece(Piece(right, REGIONS[0], (), True, 1.0), samples, domain, "P", "M"), Piece)
    few = samples.rows(np.array([False, False]))
    assert verify_piece(Piece(right, REGIONS[0], (), True, 1.0), few, domain, "P", "M") is None


@given(st.lists(st.integers(-6, 6), min_size=8, max_size=8))
@settings(max_examples=30)
def test_fits_find_the_polynomial_that_made_the_table(numbers: list[int]) -> None:
    P, M = (grid.ravel() for grid in np.meshgrid(np.arange(2, 9), np.arange(1, 12)))
    table = {"P": P, "M": M}
    monomials = list(families("P", "M", ()))[1]
    truth = np.sum([n * monomial_values(m, table) for n, m in zip(numbers, monomials, strict=False)], axis=0)
    (form,) = fit(truth[:, None, None], table, monomials)
    assert form is not None
    assert (form.at(table)[:, 0] == truth).all()
    (none,) = fit((truth + (P * M == 12))[:, None, None], table, monomials)
    assert none is None


@given(st.integers(0, 1), st.integers(-2, 1), st.integers(1, 3))
@settings(max_examples=20)
def test_counts_are_found_through_a_minimum(a: int, b: int, c: int) -> None:
    rows = np.array([(p, m, r) for p in range(2, 9) for m in range(1, 30) for r in range(p)])
    table = {"P": rows[:, 0], "M": rows[:, 1], RANK: rows[:, 2]}
    truth = np.minimum(table["P"] + a * table[RANK] + b, c * table["M"])
    for piece in (found := find_counts(truth, table, "P", "M", ())):
        applies = piece.applies(table, "P", "M")
        assert (piece.at(table)[applies] == truth[applies]).all()
    assert found


def test_forms_are_counts_on_the_critical_path() -> None:
    """By another way: following `bound_by` back from the last op."""
    schedule = legal_schedule(open_schedule("zbh1"), {"P": 5, "M": 9})
    cells = Dependencies.of(schedule)
    domain = Domain(("F", "I", "W", "p2p"))
    vectors = domain.vectors(np.random.default_rng(7), 12)
    forms = linear_forms(cells, domain, vectors)["bubble"]
    assert forms.exact.all()
    for vector, form in zip(vectors.tolist(), forms.forms.tolist(), strict=True):
        F, I, W, p2p = map(float, vector)  # noqa: E741
        timeline = simulate(schedule, Costs(F=F, I=I, W=W, p2p=p2p), cells)
        counted, cell = np.zeros(4), int(np.argmax(timeline.end))
        while cell >= 0:
            counted[schedule.kind[cells.first[cell]]] += 1
            before = int(timeline.bound_by[cell])
            counted[3] += before >= 0 and cells.rank[before] != cells.rank[cell]
            cell = before
        assert counted.tolist() == [form[0] + 9, form[1] + 9, form[2] + 9, form[3]]


def test_the_command_prints_json_and_text_and_latex() -> None:
    told = json.loads(CliRunner().invoke(main, ["report", "gpipe", "--json"]).stdout)
    assert (told["schema"], told["version"], told["schedule"]) == ("schedc.report", 1, "gpipe")
    assert next(p["formula"] for q in told["quantities"] for p in q["pieces"]) == "(B + F)*(P - 1)"
    assert "(B + F)*(P - 1)  (every rank)" in to_text(told)
    assert r"$\left(B + F\right) \left(P - 1\right)$" in to_text(told, as_latex=True)
    assert CliRunner().invoke(main, ["report", "no_such"]).exit_code == 2


@pytest.mark.parametrize("arguments", [["diff", "1f1b", "gpipe"], ["check", "1f1b", "--sweep", "P<=2"], ["list"]])
def test_only_the_report_loads_sympy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom schedc.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\nprint('sympy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
