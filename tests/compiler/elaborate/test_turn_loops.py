"""Filled orders by the compiled loop and by the interpreted one, and numbers of microbatches rank by rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.elaborate.computed_cases import findings, orders, tree_of
from schedc.elaborate import assemble, elaborate
from schedc.ir.schedule import Schedule
from schedc.load.library import names, open_schedule
from schedc.step import turn_loops
from support.needs import needed

Elaborate = Callable[[], Schedule]


def same(one: Schedule, other: Schedule) -> bool:
    columns = ("rank_start", "kind", "stage", "microbatch", "pair", "phase", "span")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Elaborate], list[Schedule]]:
    """The schedules of the interpreted loop, and of the compiled loop."""
    needed("numba")

    def run(make: Elaborate) -> list[Schedule]:
        made = []
        for loop in (lambda: None, turn_loops.load_loop):
            monkeypatch.setattr(turn_loops, "_compiled", loop)
            made.append(make())
        return made

    return run


@pytest.mark.parametrize("name", ["vhalf", "vmin"])
def test_compiled_orders_are_those_of_the_interpreted_loop(
    name: str, both: Callable[[Elaborate], list[Schedule]]
) -> None:
    for ranks, microbatches in ((1, 1), (2, 7), (3, 2), (6, 18), (8, 9)):
        one, other = both(lambda: elaborate(open_schedule(name), {"P": ranks, "M": microbatches}))  # noqa: B023
        assert same(one, other)


@pytest.mark.parametrize("within", range(1, 6))
def test_limits_and_overtaking_are_alike(within: int, both: Callable[[Elaborate], list[Schedule]]) -> None:
    body = f"timed fill W within {within} {{ for m in 0 ..< M {{ F0 at 9*m  I1 at 9*m+1  F1 at 9*m+2  I0 at 9*m+3 }} }}"
    one, other = both(lambda: elaborate(tree_of(body, "v"), {"P": 3, "M": 5}))
    assert same(one, other)
    for rank in range(3):
        held = np.cumsum([{"F": 1, "W": -1}.get(op.kind.name, 0) for op in one.ops(rank)])
        assert held.max() <= within


def test_a_deadlock_of_the_compiled_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    needed("numba")
    monkeypatch.setattr(turn_loops, "_compiled", turn_loops.load_loop)
    (finding,) = findings("timed fill W within 0 { F at 0  I at 1  F at 2  I at 3 }")
    assert finding.code == "S128"
    assert "12 ops before the end" in finding.message


def test_ranks_are_numbered_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks are numbered together: W of any chunk on rank 0, of a named one on rank 1, both on rank 2."""
    body = """
    repeat M { F0 F1 }  repeat M { I1 I0 }
    if r == 0 { repeat 2*M { W } } else { if r == 1 { repeat M { W1 W0 } } else { repeat M { W0 W } } }
    """
    cases = [(tree_of(body, "v"), {"P": 3, "M": 4})]
    cases += [(open_schedule(name), {"P": 4, "M": 8}) for name in names()]
    together = [elaborate(tree, sizes) for tree, sizes in cases]
    monkeypatch.setattr(assemble, "_MOST_TOGETHER", 1)
    for (tree, sizes), schedule in zip(cases, together, strict=True):
        assert same(schedule, elaborate(tree, sizes))
    assert [op for op in orders(together[0])[0] if "W" in op] == [f"{s}W{m}" for m in range(4) for s in (5, 0)]
    assert [op for op in orders(together[0])[2] if "W" in op] == [f"{s}W{m}" for m in range(4) for s in (2, 3)]
