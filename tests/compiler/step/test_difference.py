"""Differences of two schedules: none between equal ones, and what was changed where something was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from schedc.step.difference import compare

SAME = """schedule same(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r {
    let w = min(P-1-r, M)
    repeat w { F }
    for i in 0 ..< M - w { F @ i + w  B @ i }
    repeat w { B }
  }
}"""
"""1F1B in other words."""


def schedule(name: str, **sizes: int) -> Schedule:
    return legal_schedule(open_schedule(name), sizes)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "interleaved_1f1b", "zbv"])
def test_a_schedule_does_not_differ_from_itself(name: str) -> None:
    one = schedule(name)
    difference = compare(one, replace(one, name="other", doc="", phases=tuple(p + "x" for p in one.phases)))
    assert difference.equal
    assert all(f.first == f.second for f in difference.figures)


@given(st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=25)
def test_one_moved_op_is_found(source: int, target: int) -> None:
    """GPipe's forwards may run in any order; one is taken out and put elsewhere on rank 0."""
    one = schedule("gpipe", P=2, M=6)
    order = list(range(6))
    order.insert(target % 6, order.pop(source % 6))
    row = np.concatenate([order, np.arange(6, len(one))])
    difference = compare(one, replace(one, microbatch=one.microbatch[row]))
    if order == list(range(6)):
        assert difference.equal
        return
    (rank,) = difference.ranks
    assert rank.rank == 0
    assert rank.index == next(i for i, m in enumerate(order) if i != m)
    assert rank.first == (f"0F{rank.index}", f"0F{order[rank.index]}")
    assert rank.number == (0, 0, 1, 0)
    assert (rank.missing, rank.added) == ((), ())


def test_ops_of_one_only_and_pairs_are_told() -> None:
    difference = compare(schedule("1f1b", P=2, M=3), schedule("zbh1", P=2, M=3))
    first = difference.ranks[0]
    assert first.missing == ("0B0", "0B1", "0B2")
    assert set(first.added) == {f"0{kind}{m}" for kind in "IW" for m in range(3)}
    pairs = schedule("dualpipev", P=2, M=4)
    apart = compare(pairs, replace(pairs, pair=np.full_like(pairs.pair, -1)))
    assert [r.number[:3] for r in apart.ranks] == [(0, 0, 0)] * 2
    assert apart.ranks[0].number[3] == int((pairs.pair[pairs.rank == 0] >= 0).sum())
    assert " & " in apart.ranks[0].first[0]
    assert " & " not in apart.ranks[0].first[1]


def test_ranks_that_only_one_has_end_at_once() -> None:
    difference = compare(schedule("gpipe", P=2, M=2), schedule("gpipe", P=3, M=2))
    assert difference.ranks[-1].rank == 2
    assert difference.ranks[-1].first == ("", "2F0")


def test_figures_are_those_of_the_costs() -> None:
    costs = Costs(F=2.0, I=2.0, W=1.0)
    figures = {f.name: (f.first, f.second) for f in compare(schedule("1f1b"), schedule("zbh1"), costs).figures}
    assert figures["makespan"] == (8 * 5 + 3 * 5, 8 * 5 + 3 * 3)  # (P-1)(F+B) and (P-1)(F+I-W)
    assert figures["bubble"] == (15, 9)
    assert figures["peak_activations"] == (4, 4)
    assert figures["messages"] == (48, 48)


def test_the_command_exits_1_where_orders_differ(tmp_path: Path) -> None:
    path = tmp_path / "same.sched"
    path.write_text(SAME)
    same = CliRunner().invoke(main, ["diff", "1f1b", str(path), "-D", "P=3"])
    assert (same.exit_code, "the same on every rank" in same.stdout) == (0, True)
    differ = CliRunner().invoke(main, ["diff", "1f1b", "interleaved_1f1b", "-D", "v=2", "-D", "M=4", "--json"])
    assert differ.exit_code == 1
    facts = json.loads(differ.stdout)
    assert (facts["schema"], facts["version"], facts["equal"]) == ("schedc.diff", 1, False)
    assert facts["a"]["sizes"] == {"P": 4, "M": 4}
    assert facts["b"]["sizes"] == {"P": 4, "M": 4, "v": 2}
    assert CliRunner().invoke(main, ["diff", "1f1b", "zbh1", "-D", "k=2"]).exit_code == 2
    assert CliRunner().invoke(main, ["diff", "1f1b", "no_such"]).exit_code == 2
