"""Texts that are inferred from orders: the same orders, orders as fast, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.inference import claims, rule
from schedc.inference.families import common_placement, sum_text
from schedc.inference.numbers import fit_numbers
from schedc.inference.phases import phases_text
from schedc.inference.rule import InferredRule, infer_rule
from schedc.inference.slots import SlotRule, snapped
from schedc.inference.texts import frame_of, same_order, tree_of
from schedc.inputs import open_input
from schedc.ir.schedule import Schedule
from schedc.ir.text import print_schedule
from schedc.search.problem import Freedom
from schedc.search.solver import Effort
from schedc.search.tune import tune
from schedc.step.costs.costs import Costs
from support.needs import needed
from support.sweeps import halved

needed("ortools")
pytestmark = pytest.mark.slow

Sizes = Mapping[str, int]
ZERO, ONE = Fraction(0), Fraction(1)


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_WIDE", (4, 2, 3))


def library(name: str, sizes: Sequence[Sizes]) -> list[Schedule]:
    return [legal_schedule(open_input(name), each) for each in sizes]


def inferred(orders: Sequence[Schedule]) -> InferredRule:
    return infer_rule(orders, ranks=6)


def message(orders: Sequence[Schedule]) -> str:
    with pytest.raises(DiagnosticError) as caught:
        inferred(orders)
    (finding,) = caught.value.diagnostics
    assert finding.code == "S513"
    return finding.message


UNITS = [{"P": P, "M": k * P} for P in (2, 3, 4) for k in (2, 3)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "sizes", "held"),
    halved(
        [
            ("1f1b", UNITS, [{"P": 7, "M": 14}, {"P": 5, "M": 15}]),
            ("zb_wave", [{"P": P, "M": 2 * P, "w": 2} for P in (2, 3, 4, 5)], [{"P": 6, "M": 12, "w": 3}]),
            ("hanayo", [{"P": P, "M": 2 * P, "w": w} for P in (2, 3, 4) for w in (1, 2)], [{"P": 5, "M": 10, "w": 3}]),
            ("interleaved_1f1b", [{**size, "v": 2} for size in UNITS], [{"P": 6, "M": 18, "v": 2}]),
        ]
    ),
)
def test_a_text_gives_orders_that_it_never_saw(name: str, sizes: Sequence[Sizes], held: Sequence[Sizes]) -> None:
    result = inferred(library(name, sizes))
    assert result.equal
    assert any(each.held_out for each in result.compared)
    tree = tree_of(result.proof.text)
    for size, order in zip(held, library(name, held), strict=True):
        assert same_order(order, elaborate(tree, size)), size
    assert all(counts["proved"] == result.proof.swept.tried for _, counts in result.proof.swept.claims)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "ranks", "cases"),
    halved(
        [
            ("1f1b_overlap", (3, 4, 5), 0),
            ("eager_1f1b", (3, 4, 5), 0),
            ("zbv", (3, 4, 5), 0),
            ("dualpipev_nosplit", (3, 4, 5, 6), 1),
            ("dualpipev", (3, 4, 5, 6), 1),
        ]
    ),
)
def test_phases_are_formulas_of_ranks_and_microbatches(name: str, ranks: tuple[int, ...], cases: int) -> None:
    orders = library(name, [{"P": P, "M": M} for P in ranks for M in (2 * P, 2 * P + 1, 3 * P)])
    form = common_placement(orders)
    assert form is not None
    block = phases_text(orders[:-3], form, held=orders[-3:])
    assert block is not None
    assert block.count("if ") == cases
    text = frame_of(orders, form, "inferred", "", exact=True).text(block)
    for held in ({"P": 9, "M": 23}, {"P": 12, "M": 24}):
        assert same_order(library(name, [held])[0], elaborate(tree_of(text), held))


def test_a_text_that_fails_beyond_the_orders_makes_way_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_WIDE", (4, 2, 6))
    sizes = [{"P": P, "M": M} for P in (3, 4, 5) for M in (2 * P, 3 * P, 3 * P + 2)]
    result = infer_rule(library("gpipe", sizes), ranks=6)  # its slots are those of three units at most
    assert result.form == "phases"
    assert "repeat M  { B }" in result.proof.text


def test_held_out_orders_decide_whether_phases_are_kept() -> None:
    orders = library("eager_1f1b", [{"P": P, "M": 2 * P} for P in (3, 4, 5)])
    form = common_placement(orders)
    assert form is not None
    assert phases_text(orders, form) is not None
    assert phases_text(orders, form, held=library("1f1b", [{"P": 6, "M": 12}])) is None


def test_two_pipes_are_a_placement() -> None:
    form = common_placement(library("dualpipe", [{"P": 4, "M": M} for M in (8, 10)]))
    assert form is not None
    assert form.pipes == 2
    assert "% 2 == 0" in " ".join(
        frame_of(library("dualpipe", [{"P": 4, "M": 8}, {"P": 4, "M": 10}]), form, "two", "", exact=True).requires
    )


def test_pairs_share_slots() -> None:
    text = """schedule paired(P: ranks = 2, M: microbatches = 4) {
      place v
      rank r { timed pair fill W within 2*P + 2 { for m in 0 ..< M { for j in 0 ..< 2 {
        let s = j*P + (r if j % 2 == 0 else P-1-r)
        F[j] at 2*P*(m // P) + 2*(m % P) + s
        I[j] at 2*P*(m // P) + 2*(m % P) + 4*P - 1 - s
      } } } }
    }"""
    result = inferred([elaborate(tree_of(text), size) for size in UNITS])
    assert result.equal
    assert "timed pair fill W within 2*P + 2 {" in result.proof.text


def found(P: int) -> Schedule:
    seed = legal_schedule(open_input("hanayo"), {"P": P, "M": 2 * P, "w": 2})
    caps = np.full(P, 4.0 * P)
    return tune(seed, Costs(), caps=caps, freedom=Freedom(split=True), effort=Effort(None, 0.01, 1)).best.schedule


def test_three_found_orders_give_the_slots_of_the_zero_bubble_wave() -> None:
    result = inferred([found(P) for P in (3, 4, 5)])
    assert not result.equal
    for line in (
        "timed fill W within 2*w*P {",
        "let start = 6*w*P*(m // P) + 2*(m % P)",
        "F[j] at start + s\n",
        "I[j] at start + 4*w*P - 1 - s\n",
        "expect bubble == (P - 1)*F  when F == I and I == W",
        "expect peak_activations == 2*w*P",
    ):
        assert line in result.proof.text
    for each in result.compared:
        assert each.makespan[1] <= each.makespan[0]
    assert result.proof.where == ("P <= 6, M = 2*P, w = 2", "P <= 4, M = k*P <= 3*P, w <= 2")


def test_what_is_refused() -> None:
    assert "placement in common" in message([*library("1f1b", UNITS[:2]), *library("zbv", UNITS[2:])])
    assert "3 sizes or more, and these have 2" in message(library("1f1b", [UNITS[0], UNITS[1], UNITS[0]]))
    mixed = [*library("1f1b", UNITS[:4]), *library("gpipe", UNITS[4:])]
    assert "no text gives the held-out orders" in message(mixed)


def test_a_limit_of_time_is_told() -> None:
    orders = library("dualpipev", [{"P": P, "M": k * P} for P in (2, 3, 4) for k in (2, 3)])
    with pytest.raises(DiagnosticError) as caught:
        infer_rule(orders, seconds=0.5)
    assert "no text was found in 0.5 s" in caught.value.diagnostics[0].message


def test_the_command_passes_its_limit_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, order in enumerate(library("1f1b", UNITS[:3])):
        (tmp_path / f"{number}.order").write_text(print_schedule(order))
    first, *rest = (str(tmp_path / f"{number}.order") for number in range(3))
    rules = [part for file in rest for part in ("--rule", file)]
    monkeypatch.setattr(rule, "perf_counter", iter(range(0, 10_000, 50)).__next__)
    result = CliRunner().invoke(main, ["tune", first, *rules, "--time", "20", "--json"])
    assert "no text was found in 20 s" in json.loads(result.stdout)["diagnostics"][0]["message"]
    for option, value in (("--memory", "none"), ("--cost", "F=2"), ("--effort", "1")):
        refused = CliRunner().invoke(main, ["tune", first, *rules, option, value])
        assert refused.exit_code == 2
        assert f"{option} has no effect beside it" in refused.stderr


def test_a_claim_that_fails_in_the_range_refuses_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_SMALL", (range(2, 3), range(1, 2), range(2, 4)))  # peak 2, whatever P is
    assert "does not hold, for P = 3, M = 6" in message(library("1f1b", UNITS))


def test_the_domain_is_that_of_the_orders() -> None:
    twice = inferred(library("gpipe", UNITS[::2])).proof.text
    assert "require M == 2*P" in twice
    text = inferred(library("1f1b", UNITS)).proof.text
    assert "M == " not in text
    assert "P >= 2" in text


def test_numbers_and_sums() -> None:
    columns = {"P": [2, 3, 4], "": [1, 1, 1], "M": [4, 6, 9]}
    assert fit_numbers([3, 5, 7], columns) == [(2, "P"), (-1, "")]
    assert fit_numbers([0, 0, 0], columns) == []
    assert fit_numbers([1, 2, 4], {"P": [2, 3, 4]}) is None
    assert sum_text([(2, "P"), (-1, "")]) == "2*P - 1"
    assert sum_text([]) == "0"
    assert sum_text([(fit_numbers([1, 2, 3], {"x": [2, 4, 6]}) or [])[0], (1, "")]) == "(x + 2) / 2"
    assert common_placement(library("zb_wave_odd", [{"P": 2, "M": 4, "w": 1}])) is None


def test_the_command_prints_a_file_of_the_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "RANKS", 6)
    files = []
    for number, order in enumerate(library("zbh1", UNITS)):
        files.append(tmp_path / f"{number}.schedule")
        files[-1].write_text(print_schedule(order))
    rest = [part for file in files[1:] for part in ("--rule", str(file))]
    result = CliRunner().invoke(main, ["tune", str(files[0]), *rest, "-o", str(tmp_path / "mine.sched")])
    assert result.exit_code == 0, result.output
    assert result.stdout == (tmp_path / "mine.sched").read_text()
    assert "# Every order is equal to that of this text, op for op; 2 of them were held out" in result.stdout
    assert "schedule mine(" in result.stdout
    facts = json.loads(CliRunner().invoke(main, ["tune", str(files[0]), *rest, "--json"]).stdout)
    assert facts["equal"]
    assert [each["equal"] for each in facts["orders"]] == [True] * 6
    assert facts["failed"] == 0
    failed = CliRunner().invoke(main, ["tune", str(files[0]), "--rule", str(files[1]), "--json"])
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["diagnostics"][0]["code"] == "S513"


def test_coefficients_of_irregular_orders_are_rounded_to_a_forward_per_slot() -> None:
    fit = SlotRule(
        ("F", "I"), ((ZERO, ONE * 5, ONE * 12, ZERO), (ONE * -5, ONE * -3, ONE * 12, ONE * 8)), ZERO, False, True
    )
    assert snapped(fit).slot == ((0, 1, 2, 0), (-1, -1, 2, 2))
