"""Words of benchmarks/balance.py with few cases, which no other test has: rows, bytes, memory, and the choice.

`test_forest` has the word forest, `test_even_rows` bits, `test_rebalance` rebalance, `test_routing_record` record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import copied_memory
import emulated_balance
import even_steps

from schedc_runtime.testing import pool
from support.sweeps import in_sweeps, swept

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = argparse.Namespace(tokens=256, seed=0, networks=[9.0])


def once(ranks: int) -> Callable[[int], Any]:
    """`pool` whose answers are kept: two words ask the same of the same steps."""

    @cache
    def answers(function: str, way: str) -> Any:
        return pool(ranks).run(function, timeout=300, way=way, draws=draws[way])

    draws: dict[str, Any] = {}

    def run(function: str, *, timeout: float, way: str, **given: Any) -> Any:
        draws.setdefault(way, given["draws"])
        assert draws[way] == given["draws"]
        return answers(function, way)

    return lambda _: SimpleNamespace(run=run)


@in_sweeps(
    "runtime/moe/test_even_rows.py::test_processes",
    "runtime/moe/test_even_rows.py::test_copies_of_a_step_divide_the_rows_of_each_microbatch",
)
@pytest.mark.sweep
def test_rows_are_even_and_copies_travel_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = swept(("by step", "by microbatch"), ("by step",))
    monkeypatch.setattr(even_steps, "SKEWS", {"zipf": 1.0, "even": even_steps.EVEN})
    monkeypatch.setattr(even_steps, "WAYS", {way: even_steps.WAYS[way] for way in ways})
    monkeypatch.setattr(even_steps, "pool", once(even_steps.RANKS))
    rows, moved = even_steps.rows(OPTIONS), even_steps.moved_bytes(OPTIONS)
    assert (rows["failed"], moved["failed"]) == (0, 0)
    for way in ways:
        assert moved["zipf"][way]["copies"] > 0 == moved["even"][way]["copies"]


@in_sweeps(
    "runtime/recompute/test_recompute_adaptive.py::test_no_rank_ever_holds_more_than_the_memory_check_counts",
    "runtime/moe/test_even_rows.py::test_copies_of_a_step_divide_the_rows_of_each_microbatch",
)
@pytest.mark.sweep
def test_slots_and_worst_rows_are_those_of_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_memory, "SKEWS", {"zipf": 1.0})
    monkeypatch.setattr(copied_memory, "KINDS", copied_memory.KINDS[: swept(2, 1)])
    found = copied_memory.memory(OPTIONS)
    assert [case for case in found["figures"] if case["counted"] != case["predicted"]] == []
    assert found["cases"] == swept(5, 3)


@in_sweeps("runtime/measure/test_emulated_device.py::test_an_emulated_step_is_the_predicted_one")
def test_emulated_steps_take_as_long_as_the_choice_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies on the links, whose time a dispatch waits for."""
    monkeypatch.setattr(emulated_balance, "SKEWS", (1.6,))
    monkeypatch.setattr(emulated_balance, "LINES", {
        way: line for way, line in emulated_balance.LINES.items() if line.startswith("balance")
    })  # fmt: skip
    (case,) = emulated_balance.auto(OPTIONS)["figures"]
    assert (case["chosen"], case["fastest"]) == ("by step", "by step")
    assert case["error"] < 0.01
