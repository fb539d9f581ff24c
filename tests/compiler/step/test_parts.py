"""The table ``[parts]`` of cost files: what is read, written and refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.plan.layout.parts import WORK
from schedc.source import Source
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc.step.costs.parts import LAYERS, LEVELS, NAMES, PartCost, PartCosts

GOOD = 'schema = "schedc.costs/1"\n'


def read(text: str) -> Costs:
    return parse_costs(Source("c.toml", GOOD + text))


def wrong(text: str) -> list[Diagnostic]:
    with pytest.raises(DiagnosticError) as caught:
        read(text)
    return list(caught.value.diagnostics)


def test_parts_are_those_of_layouts() -> None:
    assert (*WORK, "op") == NAMES


def test_parts_in_tables_of_either_form() -> None:
    costs = read("[parts]\nmoe = {F = 1, I = 2, W = 3}\n[parts.head]\nF = 4\n")
    assert costs.parts == PartCosts(moe=PartCost(1, 2, 3), head=PartCost(F=4))


@pytest.mark.parametrize(
    ("text", "code", "line", "said"),
    [
        ("[parts]\nexperts = {F = 1}\n", "S401", 3, "`experts` is no part of a model"),
        ("[parts]\nmo = {F = 1}\n", "S401", 3, "did you mean `moe`?"),
        ("[parts]\ndense = {F = 1}\nmoe = {B = 1}\n", "S401", 4, "known here: F, I, W, norm"),
        ("[parts]\nhead = {full = 1}\n", "S401", 3, "known here: F, I, W"),
        ("[parts]\nmoe = {none = 1}\n", "S401", 3, "norm, act, light, medium, full, layer"),
        ("[parts]\nmoe = {full = -1}\n", "S402", 3, "`full` of `moe` is -1"),
        ("[parts]\nmoe = 3\n", "S402", 3, "write moe = {F = 1.4, I = 1.5, W = 1.2}"),
        ("[parts]\nmoe = {F = -1}\n", "S402", 3, "`F` of `moe` is -1"),
        ("[parts]\nmoe = {W = nan}\n", "S402", 3, "a number from 0 to 1e+15"),
        ("[parts]\nmoe = {I = 1e16}\n", "S402", 3, "`I` of `moe` is 1e+16"),
        ("[parts]\nmoe = {F = [1, 2]}\n", "S402", 3, "[1, 2]"),
        ("[parts]\nmoe = {F = true}\n", "S402", 3, "True"),
        ("[parts.moe]\nF = '1'\n", "S402", 2, "'1'"),
        ("parts = 3\n", "S402", 2, "write [parts]"),
        ("[part]\nmoe = {F = 1}\n", "S401", 2, "did you mean `parts`?"),
        ("[parts]\nmoe = {F = 1}\n[ops]\nB = [1, 2]\n", "S411", 5, "leave it out, or the table [parts]"),
        ("[ops]\nF = 1\n[parts.moe]\nF = 2\n", "S411", 3, "`F` is the time of an op"),
        ("[ops]\nR = 1\n[parts]\nmoe = {F = 1}\n", "S411", 3, "or give a list with one time per stage"),
    ],
)
def test_wrong_tables(text: str, code: str, line: int, said: str) -> None:
    (finding,) = wrong(text)
    assert finding.position[:2] == (code, line)
    assert said in finding.message + finding.help


def test_what_goes_beside_parts() -> None:
    ops = "FB = [3, 4]\nR = [1, 2]\np2p = 0.5\ndp = 2"
    costs = read(f"[ops]\n{ops}\n[parts]\nmoe = {{F = 1}}\n[memory]\nactivation = 2\n")
    assert (costs.FB, costs.R, costs.p2p, costs.activation) == ((3, 4), (1, 2), 0.5, 2)
    with pytest.raises(DiagnosticError) as caught:
        Costs.from_options(["p2p=1", "F=2", "FB=3", "R=1,2"], costs)
    assert [finding.code for finding in caught.value.diagnostics] == ["S411", "S411"]


def in_order(times: dict[tuple[str, str], float]) -> tuple[tuple[str, str, float], ...]:
    """Times of levels as a table has them: part by part, by ascending level."""
    return tuple((part, level, times[part, level]) for part in NAMES for level in LEVELS if (part, level) in times)


times = st.builds(PartCost, *[st.floats(0, 1e15)] * 3)


levels = st.dictionaries(st.tuples(st.sampled_from(LAYERS), st.sampled_from(LEVELS)), st.floats(0, 1e15))


@given(st.builds(PartCosts, *[times] * len(NAMES), recomputed=levels.map(in_order)), st.floats(0, 1e15))
def test_what_is_written_reads_back_equal(parts: PartCosts, p2p: float) -> None:
    costs = Costs(p2p=p2p, parts=parts, given=frozenset({"p2p", "parts"}))
    assert parse_costs(Source("c.toml", dump_costs(costs))) == costs
