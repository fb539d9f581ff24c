"""The parts of a report: pieces, fits, counts, forms, and the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.exact.pieces import volume
from schedc.exact.space import Space
from schedc.exact.times import BUBBLE
from schedc.formulas.cost_domains import random_vectors, spaces_of
from schedc.formulas.counts import RANK, find_counts
from schedc.formulas.fit import LinearForm, families, fit, monomial_values, size_atom
from schedc.formulas.measure import TIMES, measured, times_at
from schedc.formulas.pieces import FailedPiece, Piece, Untried
from schedc.formulas.proof import DecidedSize, complete_at, prove
from schedc.formulas.regions import REGIONS
from schedc.load.library import open_schedule
from schedc.report.formulas import to_text
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import simulate

pytestmark = pytest.mark.slow


def test_a_wrong_piece_is_refuted_and_a_right_one_proved() -> None:
    one, P = Fraction(1), size_atom("P")
    table = {"P": np.array([2, 3, 4, 5] * 3), "M": np.array([4] * 4 + [5] * 4 + [9] * 4)}
    space = Space(("F", "B"), split=False)
    at = []
    for row, (p, m) in enumerate(zip(table["P"].tolist(), table["M"].tolist(), strict=True)):
        times = times_at(Dependencies.of(legal_schedule(open_schedule("gpipe"), {"P": p, "M": m})), space)
        assert times is not None
        at.append(DecidedSize(table, row, space, times, TIMES["bubble"]))
    small = {name: column[:8] for name, column in table.items()}
    parameters = ("P", "M")
    wrong = LinearForm((((P,), (one, one)),), 2)  # P (F + B), for gpipe's (P - 1)(F + B)
    outcome = prove(Piece(wrong, REGIONS[0], ()), at, small, parameters)
    assert isinstance(outcome, FailedPiece)
    F, B = outcome.costs["F"], outcome.costs["B"]
    assert (outcome.sizes, outcome.said, outcome.measured) == ({"P": 2, "M": 4}, 2 * (F + B), F + B)
    right = LinearForm((((P,), (one, one)), ((), (-one, -one))), 2)
    proved = prove(Piece(right, REGIONS[0], ()), at, {"P": np.array([2]), "M": np.array([4])}, parameters)
    assert isinstance(proved, Piece)
    assert (proved.proved, proved.largest, proved.share, proved.even) == (12, {"P": 5, "M": 9}, 1, True)
    assert isinstance(prove(Piece(right, REGIONS[0], ()), at, table, parameters), Untried)
    assert prove(Piece(right, REGIONS[0], ()), at[:2], small, parameters) is None
    assert complete_at([right], at[0])
    assert not complete_at([wrong], at[0])
    assert not complete_at([LinearForm((((), (one, one)),), 2)], at[1])


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "vmin"])
def test_the_pieces_of_a_time_fill_all_costs_and_are_it(name: str) -> None:
    """Volumes in fractions, and random cost vectors that the pieces were not made from."""
    cells = Dependencies.of(legal_schedule(open_schedule(name), {"P": 6, "M": 14}))
    for space in spaces_of([cells]):
        times = times_at(cells, space)
        assert times is not None
        vectors = random_vectors(space, 40, seed=3)
        for quantity in TIMES.values():
            known = measured(times, space, quantity, most=100)
            assert known is not None
            assert sum(map(volume, known.pieces.values())) == volume(space.cone)
            assert [known.value(vector) for vector in vectors] == times.values(quantity, vectors)


@given(st.lists(st.integers(-6, 6), min_size=8, max_size=8))
@settings(max_examples=30)
def test_fits_find_the_polynomial_that_made_the_table(numbers: list[int]) -> None:
    P, M = (grid.ravel() for grid in np.meshgrid(np.arange(2, 9), np.arange(1, 12)))
    table = {"P": P, "M": M}
    monomials = list(families(("P", "M")))[1]
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
    for piece in (found := find_counts(truth, table, ("P", "M"))):
        applies = piece.applies(table, ("P", "M"))
        assert (piece.at(table)[applies] == truth[applies]).all()
    assert found


def test_forms_are_counts_on_the_critical_path() -> None:
    """By another way: following `bound_by` back from the last op."""
    schedule = legal_schedule(open_schedule("zbh1"), {"P": 5, "M": 9})
    cells = Dependencies.of(schedule)
    space = spaces_of([cells])[2]
    times = times_at(cells, space)
    assert times is not None
    for vector in random_vectors(space, 12, seed=7):
        F, I, W, p2p = map(float, vector)  # noqa: E741
        timeline = simulate(schedule, Costs(F=F, I=I, W=W, p2p=p2p), cells)
        counted, cell = np.zeros(4), int(np.argmax(timeline.end))
        while cell >= 0:
            counted[schedule.kind[cells.first[cell]]] += 1
            before = int(timeline.bound_by[cell])
            counted[3] += before >= 0 and cells.rank[before] != cells.rank[cell]
            cell = before
        form = times.form(BUBBLE, vector)
        assert counted.tolist() == [form[0] + 9, form[1] + 9, form[2] + 9, form[3]]


def test_the_command_prints_json_and_text_and_latex() -> None:
    told = json.loads(CliRunner().invoke(main, ["report", "gpipe", "--json"]).stdout)
    assert (told["schema"], told["version"], told["schedule"]) == ("schedc.report", 1, "gpipe")
    assert next(p["formula"] for q in told["quantities"] for p in q["pieces"]) == "(B + F)*(P - 1)"
    assert "(B + F)*(P - 1)  (every rank)  [" in to_text(told)
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
