"""Costs from options and files: what is accepted, and what is said about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.source import Source
from schedc.step.costs.costs import Costs, dump_costs, load_costs, parse_costs
from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "costs" / "uneven.toml"
GOOD = 'schema = "schedc.costs/1"\n'


def wrong(text: str) -> list[Diagnostic]:
    with pytest.raises(DiagnosticError) as caught:
        parse_costs(Source("c.toml", text))
    return list(caught.value.diagnostics)


def wrong_options(*options: str) -> list[Diagnostic]:
    with pytest.raises(DiagnosticError) as caught:
        Costs.from_options(options)
    return list(caught.value.diagnostics)


def test_options() -> None:
    costs = Costs.from_options(["F=1", " p2p = 0.05 ", "FB=2.5", "I=1,2,3", "F=4"])
    assert costs == Costs(F=4.0, p2p=0.05, FB=2.5, I=(1.0, 2.0, 3.0))
    assert Costs.from_options(["W=2"], base=costs) == Costs(F=4.0, p2p=0.05, FB=2.5, I=(1.0, 2.0, 3.0), W=2.0)


@pytest.mark.parametrize(
    ("option", "code", "said"),
    [
        ("f=1", "S401", "did you mean `F`?"),
        ("pending=1", "S401", "did you mean `pending_weight`?"),
        ("F", "S403", "write KEY=VALUE"),
        ("F=", "S402", "not a number"),
        ("F=fast", "S402", "'fast'"),
        ("F=-1", "S402", "-1.0"),
        ("F=nan", "S402", "nan"),
        ("F=inf", "S402", "inf"),
        ("F=1e16", "S402", "1e+16"),
        ("F=1,-2", "S402", "-2.0"),
        ("p2p=1,2", "S402", "one value for all stages"),
    ],
)
def test_wrong_options(option: str, code: str, said: str) -> None:
    (found,) = wrong_options(option)
    assert found.code == code
    assert said in found.message + found.help


def test_all_wrong_options_are_reported_at_once() -> None:
    assert [d.code for d in wrong_options("G=1", "F=1", "W=x", "nothing")] == ["S401", "S402", "S403"]


def test_a_file() -> None:
    costs = load_costs(EXAMPLE)
    assert costs.F == (1.2, 1.0, 1.0, 1.4)
    assert (costs.I, costs.W, costs.B, costs.p2p, costs.pending_weight) == (1.0, 0.9, None, 0.05, 0.5)


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("[ops]\nF = 1\n", [("S405", 1, 1)]),
        ('schema = "other"\n', [("S405", 1, 1)]),
        (GOOD + "[ops]\nF = \n", [("S405", 3, 5)]),
        (GOOD + "[ops]\nF = 1\n  G = 2\nW = -1\n", [("S401", 4, 3), ("S402", 5, 1)]),
        (GOOD + "[ops]\nF = [1, true]\n", [("S402", 3, 1)]),
        (GOOD + "[ops]\nF = []\np2p = [1]\n", [("S402", 3, 1), ("S402", 4, 1)]),
        (GOOD + "[ops]\nF = inf\nI = nan\nW = '1'\n", [("S402", 3, 1), ("S402", 4, 1), ("S402", 5, 1)]),
        (GOOD + "F = 1\n", [("S401", 2, 1)]),
        (GOOD + "memory = 1\n", [("S402", 2, 1)]),
        (GOOD + "[memry]\nactivation = 1\n", [("S401", 2, 1)]),
        (GOOD + "[memory]\nF = 1\n", [("S401", 3, 1)]),
    ],
)
def test_wrong_files(text: str, positions: list[tuple[str, int, int]]) -> None:
    assert [d.position for d in wrong(text)] == positions


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "c.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (binary, tmp_path / "none.toml", tmp_path):
        with pytest.raises(DiagnosticError) as caught:
            load_costs(path)
        assert [d.code for d in caught.value.diagnostics] == ["S405"]


def test_lists_have_one_value_per_stage() -> None:
    costs = parse_costs(Source("c.toml", GOOD + "[ops]\nF = [1, 2]\n[memory]\nactivation = [1, 2, 3]\n"))
    with pytest.raises(DiagnosticError) as caught:
        costs.resolved(4)
    assert [d.position for d in caught.value.diagnostics] == [("S404", 3, 1), ("S404", 5, 1)]
    with pytest.raises(DiagnosticError, match="has 2 values, the schedule has 1 stage"):
        Costs(F=(1.0, 2.0)).resolved(1)


def test_defaults_are_per_stage() -> None:
    costs = Costs(F=(1.0, 2.0), I=(3.0, 4.0), W=5.0).resolved(2)
    assert costs.B.tolist() == [8, 9]


numbers = st.floats(0, 1e15)
values = numbers | st.lists(numbers, min_size=1, max_size=4).map(tuple)


@given(st.builds(Costs, F=values, I=values, W=values, B=st.none() | values, FB=st.none() | values, p2p=numbers,
                 activation=values, pending_weight=values))  # fmt: skip
def test_what_is_written_reads_back_equal(costs: Costs) -> None:
    assert parse_costs(Source("c.toml", dump_costs(costs))) == costs


def missing(text: str, schedule: str, *options: str, **sizes: int) -> list[tuple[str, int, int, str]]:
    """Findings about costs of a file under a schedule: position and first word after `give no`."""
    costs = Costs.from_options(options, parse_costs(Source("c.toml", GOOD + text)))
    try:
        analyse(schedule, sizes or {"P": 2, "M": 4}, costs)
    except DiagnosticError as error:
        return [(*d.position, d.message.split("give no ")[1].split(",")[0]) for d in error.diagnostics]
    return []


def test_a_file_in_a_unit_of_its_own_gives_all_times() -> None:
    """Defaults of 1 stand only beside nothing that says how long an F or a B takes."""
    assert missing("[ops]\nF = 3\nB = 6\n", "1f1b") == []
    assert missing("[ops]\nF = 3\nI = 3\nW = 3\n", "1f1b") == []
    assert missing("[ops]\nF = 3\nB = 6\n", "zbh1") == [("S410", 2, 1, "I"), ("S410", 2, 1, "W")]
    assert missing("[ops]\nF = 3\nB = 6\n", "zbh1", "I=4") == [("S410", 2, 1, "W")]
    assert missing("[ops]\nF = 3\nB = 6\n", "zbh1", "I=4", "W=2") == []
    assert missing("[ops]\nF = 3\nI = 4\n", "1f1b") == [("S410", 2, 1, "B")]
    assert missing("[ops]\nB = 6\n", "1f1b") == [("S410", 2, 1, "F")]
    assert missing("[ops]\nW = 0.5\n", "zbh1") == []
    assert missing("[ops]\nW = 0.5\n", "zbh1", "F=2") == []
    assert missing("", "zbh1", "F=2") == []


@pytest.mark.parametrize(
    "line",
    ["check zbh1 --sweep P==2,M==4", "show zbh1", "tune 1f1b --split -D P=2 -D M=2 --effort 1"],
)
def test_every_command_says_what_a_file_leaves_out(line: str, tmp_path: Path) -> None:
    """The refusal holds for a sweep as for one size, and for backwards that a search may split."""
    path = tmp_path / "whole.toml"
    path.write_text(GOOD + "[ops]\nF = 3\nB = 6\n")
    result = CliRunner().invoke(main, [*line.split(), "--cost-file", str(path)])
    assert result.exit_code == 1
    assert "S410" in result.output + str(result.exception)


def test_times_of_pairs_stand_for_their_halves(tmp_path: Path) -> None:
    """An F and a B that run only in pairs need no time of their own, an I or a lone F does."""
    path = tmp_path / "pairs.sched"
    path.write_text(
        "sched 1\nschedule pairs(P: ranks = 1, M: microbatches = 4) {\n  place linear\n"
        "  rank r { F  repeat M-1 { F & B }  I W }\n}\n"
    )
    sizes = {"P": 1, "M": 4}
    assert missing("[ops]\nF = 3\nI = 2\nW = 2\nFB = 6\n", str(path), **sizes) == []
    assert missing("[ops]\nF = 3\nFB = 6\n", str(path), **sizes) == [("S410", 2, 1, "I"), ("S410", 2, 1, "W")]
    assert missing("[ops]\nF = 3\nI = 2\nFB = 6\n", str(path), **sizes) == [("S410", 2, 1, "W")]


def test_what_is_not_given_is_not_written() -> None:
    costs = Costs(F=2.0, B=5.0, given=frozenset({"F", "B"}))
    assert dump_costs(costs).split() == ["schema", "=", '"schedc.costs/1"', "[ops]", "F", "=", "2.0", "B", "=", "5.0"]
