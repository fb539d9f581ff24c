"""Conditions on plans: reading, decisions, and the places of mistakes in texts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from schedc.diagnostics import RequestError
from schedc.ir.parallel import Parallel
from schedc.planner.presets.tables import files
from schedc.planner.space.conditions import EXCLUDE, open_restriction, read_condition

AXES = {
    "pp": np.array([1, 4, 8]),
    "tp": 4,
    "zero": 1,
    "cp": 1,
    "ep": 8,
    "schedule": np.array(["1f1b", "zbv", "dualpipev"]),
    "recompute": "layer",
    "overlap": np.array([True, False, False]),
}
NAMES = ("1f1b", "zbv", "dualpipev")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pp >= 4", [False, True, True]),
        ("tp*pp <= 16 and recompute == layer", [True, True, False]),
        ("schedule in zbv, 1f1b", [True, True, False]),
        ("schedule not in (zbv, 1f1b)", [False, False, True]),
        ("schedule == '1f1b' or pp > 4", [True, False, True]),
        ("not overlap", [False, True, True]),
        ("2 <= pp < 8", [False, True, False]),
        ("pp in 1, 8", [True, False, True]),
        ("pp % 4 == 0", [False, True, True]),
        ("zero <= 1 and schedule in 1f1b, zbv", [True, True, False]),
    ],
)
def test_conditions_decide(text: str, expected: list[bool]) -> None:
    holds = read_condition(text, schedules=NAMES).holds(AXES)
    excluded = read_condition(text, EXCLUDE, NAMES).holds(AXES)
    assert np.broadcast_to(holds, 3).tolist() == expected
    assert np.broadcast_to(excluded, 3).tolist() == [not each for each in expected]


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("pp >", 1),
        ("pp = 4", 4),
        ("foo > 2", 1),
        ("tp > 1 and pp", 12),
        ("schedule == zbw", 13),
        ("schedule in 1f1b, 2f2b", 19),
        ("schedule < zbv", 12),
        ("recompute == ful", 14),
        ("tp.real > 1", 1),
        ("__import__('os')", 1),
        ("pp > (1 if tp else 2)", 7),
        ("pp > 99999999999999", 6),
        ("zbv in schedule, 3", 1),
        ("tp in schedule", 7),
    ],
)
def test_faults_have_a_place(text: str, column: int) -> None:
    with pytest.raises(RequestError) as raised:
        read_condition(text, schedules=NAMES)
    assert raised.value.diagnostics[0].position == ("S711", 1, column)


@pytest.mark.parametrize("text", ["a2a == flat", "pp > 1 and a2a in hier, flat"])
def test_titles_of_columns_name_their_axis(text: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_condition(text)
    assert raised.value.diagnostics[0].message == "there is no axis `a2a`"
    assert raised.value.diagnostics[0].help == "the column `a2a` is the axis `alltoall`"


@pytest.mark.parametrize("text", ["", "   ", "pp > 1\npp > 2", "pp > " + "1" * 600, "(" * 400])
def test_texts_without_a_place_are_refused(text: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_condition(text)
    assert {finding.code for finding in raised.value.diagnostics} == {"S711"}


def test_restrictions_are_read() -> None:
    shipped = files("restrictions")
    assert "megatron" in shipped
    for name in shipped:
        restriction = open_restriction(name)
        assert restriction.conditions
        assert restriction.says
        assert restriction.source
    with pytest.raises(RequestError) as raised:
        open_restriction("megatrom")
    assert raised.value.diagnostics[0].code == "S713"
    assert "megatron" in raised.value.diagnostics[0].help


def test_a_plan_of_megatron_core_has_an_order_and_levels_that_can_be_exported() -> None:
    conditions = open_restriction("megatron-core").conditions
    plan = {
        "zero": 1,
        "pp": 2,
        "vpp": 2,
        "ep": 8,
        "overlap": True,
        "recompute": "none",
        "where": "all",
        "alltoall": "flat",
    }

    def held(**axes: object) -> bool:
        return all(bool(each.holds(plan | axes)) for each in conditions)

    assert held(schedule="interleaved_overlap")
    assert not held(schedule="interleaved_overlap", ep=1)
    assert not held(schedule="interleaved_overlap", recompute="layer")
    assert not held(schedule="interleaved_overlap", alltoall="allgather")
    assert held(schedule="interleaved_1f1b", overlap=False, recompute="layer")
    assert not held(schedule="interleaved_1f1b", overlap=False, recompute="layer", where="chunk0")
    assert not held(schedule="interleaved_1f1b", overlap=False, recompute="act")
    assert held(schedule="1f1b_overlap", pp=1, vpp=1)
    assert not held(schedule="1f1b_overlap", vpp=1)
    assert not held(schedule="interleaved_overlap", vpp=1)
    assert not held(schedule="dualpipev")


def test_the_restriction_to_this_runtime_is_what_it_does_not_refuse() -> None:
    conditions, ranks = open_restriction("schedc").conditions, (1, 2, 3, 4, 8)
    for tp, cp, ep, zero in product(ranks, ranks, ranks, range(4)):
        parallel = Parallel(tp=tp, of="attention" if tp > 1 else "", cp=cp, ep=ep, dp=24, zero=zero)
        axes = {"tp": tp, "cp": cp, "ep": ep, "zero": zero}
        assert all(bool(each.holds(axes)) for each in conditions) == (parallel.refusal is None), parallel
