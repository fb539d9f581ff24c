"""Ranges of sizes mean what they say, and a sweep finds the smallest size that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.claims.size_range import sizes_in
from schedc.claims.sweep import sweep
from schedc.cli import main
from schedc.diagnostics import DiagnosticError
from schedc.load.library import names, open_schedule
from schedc.step.costs.costs import Costs
from support.sweeps import halved, swept

# Complete at every size but those with more than 2 ranks and an odd number of microbatches above 4.
FAILING = """sched 1
schedule late(P: ranks = 2, M: microbatches = 2) {
  require M % 7 != 0
  place linear
  rank r {
    phase forward  repeat M { F }
    phase backward repeat M - (P > 2) * (M > 4) * (M % 2)  { B }
  }
  expect bubble == (P-1)*(F+B)
}
"""


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("P<=3, M<=2", {}, [(p, m) for p in (1, 2, 3) for m in (1, 2)]),
        ("2 <= P and P < 4, M <= 2*P, M >= P", {}, [(p, m) for p in (2, 3) for m in range(p, 2 * p + 1)]),
        ("M<=2*P, P<=3, M % P == 0", {}, [(p, m) for p in (1, 2, 3) for m in (p, 2 * p)]),
        ("M<=2", {"P": 5}, [(5, 1), (5, 2)]),
        ("P<=2", {}, [(1, 8), (2, 8)]),
        ("P == 4, max(P, M) == 4, not (M == 2), M <= 9", {}, [(4, 1), (4, 3), (4, 4)]),
        ("P<=3, M<=P-2", {}, [(3, 1)]),
        ("P<=0", {}, []),
    ],
)
def test_a_range_lists_its_sizes(text: str, given: dict[str, int], expected: list[tuple[int, int]]) -> None:
    assert [tuple(sizes.values()) for sizes in sizes_in(text, open_schedule("1f1b"), given)] == expected


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("P<=16, M<=4*", ("S001", 1, 13)),
        ("P<=16, Q<3", ("S511", 1, 8)),
        ("P<=4, M<=P if", ("S001", 1, 14)),
        ("M<=4*P", ("S511", 1, 1)),
        ("P<=M, M<=P", ("S511", 1, 1)),
        ("P<=2.5", ("S511", 1, 4)),
        ("f(P)<=2", ("S511", 1, 1)),
        ("P<=4, M<=7/2", ("S116", 1, 10)),
        ("P<=4 } schedule x() { require 1", ("S511", 1, 1)),
        ("P<=4 place linear", ("S511", 1, 1)),
        ("P<=1000000000", ("S512", 1, 1)),
        ("P<=2000, M<=2000", ("S512", 1, 1)),
        ("", ("S001", 1, 1)),
    ],
)
def test_what_is_no_range_is_refused_at_its_place(text: str, position: tuple[str, int, int]) -> None:
    with pytest.raises(DiagnosticError) as error:
        list(sizes_in(text, open_schedule("1f1b"), {}))
    assert error.value.diagnostics[0].position == position
    assert error.value.diagnostics[0].source is not None
    assert error.value.diagnostics[0].source.text == text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_sweep_finds_the_smallest_failing_size(processes: int, tmp_path: Path) -> None:
    path = tmp_path / "late.sched"
    path.write_text(FAILING)
    tree = open_schedule(path)
    sizes = list(sizes_in("P<=5, M<=12", tree, {}))
    done: list[int] = []
    result = sweep(tree, sizes, Costs(), done.append, processes)
    failing = [s for s in sizes if s["P"] > 2 and s["M"] > 4 and s["M"] % 2 and s["M"] % 7]
    assert (result.tried, result.refused, result.failed) == (55, 5, len(failing))
    assert sum(done) == len(sizes) == 60
    assert sorted(map(str, result.failing)) == sorted(map(str, failing))
    assert result.smallest is not None
    assert result.smallest.sizes == {"P": 3, "M": 5}
    assert {d.code[:2] for d in result.smallest.diagnostics} == {"S2"}
    ((claim, counts),) = result.claims
    assert claim == "bubble == (P-1)*(F+B)"
    assert counts == {"proved": 55 - len(failing), "refuted": 0, "vacuous": 0, "order": 0, "tried": 0}


def test_the_command_reports_and_exits_1_where_a_size_fails(tmp_path: Path) -> None:
    path = tmp_path / "late.sched"
    path.write_text(FAILING)
    result = CliRunner().invoke(main, ["check", str(path), "--sweep", "P<=3, M<=6", "--json"])
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert (facts["schema"], facts["version"], facts["smallest_failing"]) == ("schedc.sweep", 1, {"P": 3, "M": 5})
    assert facts["failing"] == [{"P": 3, "M": 5}]
    said = CliRunner().invoke(main, ["check", str(path), "--sweep", "P<=5, M<=12"]).stdout
    assert (
        "the smallest size that fails: P = 3, M = 5\nothers that fail: P = 4, M = 5; P = 5, M = 5; P = 3, M = 9; "
        in said
    )
    assert said.endswith("; P = 5, M = 11\n")
    good = CliRunner().invoke(main, ["check", "zbh1", "--sweep", "P<=4, M<=2*P"])
    assert (good.exit_code, good.stderr) == (0, "")
    assert good.stdout.startswith("zbh1: 20 sizes checked, 0 refused, 0 failed\n")
    assert CliRunner().invoke(main, ["check", "zbh1", "--sweep", "P<="]).exit_code == 2


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("arguments", halved([["check", "--sweep", "P<=2, M<=2"], ["report"]]))
def test_of_a_plan_its_schedule_is_spoken_of_and_that_is_said(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.sched"
    path.write_text("plan large = 1f1b(P = 4, M = 8) { layers 11  costs head 3 }\n")
    result = CliRunner().invoke(main, [arguments[0], str(path), *arguments[1:]])
    assert result.exit_code == 0
    assert result.stderr == "note: large is a plan: what follows is about schedule `1f1b`, without layers\n"
    assert CliRunner().invoke(main, [arguments[0], "1f1b", *arguments[1:]]).stderr == ""


def test_the_switch_of_the_long_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, chosen in (("", "reduced"), ("full", "full")):
        monkeypatch.setenv("SCHEDC_SWEEP", value)
        assert swept("full", "reduced") == chosen
    monkeypatch.setenv("SCHEDC_SWEEP", "1")
    with pytest.raises(ValueError, match="set it to full"):
        swept("full", "reduced")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", swept(names(), ["1f1b", "zbh1", "dualpipev", "interleaved_1f1b"]))
def test_library_schedules_hold_in_a_range(name: str) -> None:
    tree = open_schedule(name)
    result = sweep(tree, list(sizes_in(swept("P<=16, M<=64", "P<=5, M<=12"), tree, {})), Costs(), processes=1)
    assert result.failed == 0
    assert result.tried >= 8
