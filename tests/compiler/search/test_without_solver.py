"""`schedc tune` without OR-tools: floors, proofs and orders of its own, and what could not be tried."""

from __future__ import annotations

import sys
from importlib import util

import pytest

from support.commands import facts_of, schedc

MISSING = "the solver's search needs OR-tools: pip install 'schedc[tune]'"


@pytest.fixture(autouse=True)
def without_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides OR-tools from whoever looks for it, and from whoever loads it without a look."""
    spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "ortools" else spec(name, *rest))
    monkeypatch.setitem(sys.modules, "ortools", None)


def test_a_seed_on_its_floor_is_proved() -> None:
    facts = facts_of("tune", "vhalf", "-D", "P=8", "-D", "M=16")
    assert (facts["proven"], facts["found"]["makespan"], facts["untried"]) == (True, 113, [])
    assert "not tried" not in schedc("tune", "vhalf", "-D", "P=8", "-D", "M=16").output


@pytest.mark.slow
def test_orders_are_found_and_what_was_not_tried_is_named() -> None:
    arguments = ("tune", "vmin", "-D", "P=8", "-D", "M=16", "--memory", "4", "--effort", "1")
    facts = facts_of(*arguments)
    assert facts["untried"] == [MISSING]
    assert (facts["proven"], facts["search"]["status"], facts["lower_bound"]) == (False, "missing", 119)
    assert facts["lower_bound"] < facts["found"]["makespan"] <= 123
    output = schedc(*arguments).output
    assert f"not tried: {MISSING}" in output
    assert "searched" not in output


@pytest.mark.slow
def test_a_cap_that_only_the_solver_could_keep_is_refused_with_the_remedy() -> None:
    result = schedc("tune", "dualpipev", "-D", "P=4", "-D", "M=8", "--memory", "3.75")
    assert result.exit_code == 1
    assert "was found without the solver" in result.output
    assert MISSING in result.output
