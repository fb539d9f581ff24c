"""List schedules by slots and from both ends: legal, within the cap, the same compiled or not, and on floors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.frontier.library import library_at, same_placement
from schedc.inputs import open_input
from schedc.ir.ops import OpKind
from schedc.search.bounds import OpWindows
from schedc.search.floors import rank_floors
from schedc.search.known import known_starts
from schedc.search.problem import Freedom, SearchProblem, problem_of
from schedc.search.tune import start_times, with_cell_order
from schedc.search.varied import FoundOrder, ListEffort, ListProblem, search_orders, start_order
from schedc.step.costs.costs import Costs
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from support.needs import needed
from support.sweeps import halved

UNEVEN = Costs(F=(1.5, 1, 1, 1, 2, 1, 1, 1), I=(1, 2, 1, 1, 1, 1, 1, 3), W=0.5, p2p=0.25)


def problem(
    name: str, cap: float | None, costs: Costs | None = None, split: bool = False, **sizes: int
) -> SearchProblem:
    schedule = legal_schedule(open_input(name), sizes)
    caps = None if cap is None else np.full(schedule.ranks, cap)
    return problem_of(schedule, costs or Costs(), caps, Freedom(split=split))


def searched(given: SearchProblem, tries: int, seed: int = 0, compiled: bool = False) -> FoundOrder:
    found = search_orders(ListProblem(given, compiled), [], ListEffort(None, tries, 0, seed))
    assert found is not None
    return found


CASES: list[tuple[str, float | None, Costs, bool, dict[str, int]]] = [
    ("hanayo", 6, Costs(), True, {"P": 2, "M": 4, "w": 2}),
    ("zbv", 5, UNEVEN, False, {"P": 4, "M": 6}),
    ("zbv", 8, Costs(pending_weight=0.5, p2p=0.3), False, {"P": 4, "M": 6}),
    ("vhalf", None, UNEVEN, False, {"P": 4, "M": 6}),
    ("dualpipev", 9, Costs(FB=1.5), False, {"P": 4, "M": 8}),
    ("dualpipe", 9, Costs(FB=1.5, p2p=0.2), False, {"P": 4, "M": 8}),
]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("name", "cap", "costs", "split", "sizes"), halved(CASES))
def test_orders_are_legal_within_the_cap_and_take_what_the_loop_said(
    name: str, cap: float | None, costs: Costs, split: bool, sizes: dict[str, int]
) -> None:
    """The loop's starts are possible: the compiler's own timeline is never later, and mostly the same."""
    given = problem(name, cap, costs, split, **sizes)
    for seed in range(3):
        found = searched(given, 12, seed)
        assert 0 <= found.start.min() <= (found.start + given.duration).max() <= found.makespan
        order = with_cell_order(given, start_order(found.start))
        assert check_schedule(order) == []
        makespan = simulate(order, costs).makespan
        assert makespan <= given.time.cost(found.makespan) + 1e-9
        assert max(each.makespan for each in rank_floors(OpWindows(given))) <= found.makespan
        if cap is not None:
            assert measure_memory(order, costs).peak_memory.max() <= cap + 1e-9


def test_each_start_waits_for_what_it_needs_from_either_end() -> None:
    given = problem("zbv", 6, UNEVEN, P=4, M=6)
    lists = ListProblem(given, compiled=False)
    makespan, start = lists.forward(np.arange(len(given)), 1)
    late, back = lists.backward(makespan - start - given.duration, 1)
    assert min(makespan, late) > 0
    for begin in (start, late - back - given.duration):
        assert (begin[given.after] >= begin[given.before] + given.duration[given.before] + given.lag).all()
        for low, high in pairwise(given.dependencies.rank_start.tolist()):
            cells = low + np.argsort(begin[low:high])
            assert (begin[cells[1:]] >= begin[cells[:-1]] + given.duration[cells[:-1]]).all()


def test_an_order_is_priced_as_it_is() -> None:
    given = problem("zbv", None, UNEVEN, P=4, M=6)
    order = given.dependencies.levels.order.tolist()
    expected = start_times(given, order)
    makespan, start = ListProblem(given, compiled=False).fixed(expected)(np.zeros(len(given), np.int64))
    assert start.tolist() == expected.tolist()
    assert given.time.cost(makespan) == simulate(given.schedule, UNEVEN).makespan


@pytest.mark.slow
def test_the_compiled_loop_gives_the_same_orders() -> None:
    needed("numba")
    for name, cap, costs, split, sizes in CASES:
        given = problem(name, cap, costs, split, **sizes)
        one, other = (searched(given, 30, 3, compiled) for compiled in (False, True))
        assert one.makespan == other.makespan
        assert one.start.tolist() == other.start.tolist()


def test_room_that_is_reserved_lets_begun_microbatches_end() -> None:
    """Forwards first, in loops of four stages per rank: without room for older microbatches all ranks come to wait."""
    given = problem("interleaved_1f1b", 8, P=4, M=8, v=4)
    forward = (given.schedule.kind[given.dependencies.first] != OpKind.F).astype(np.int64)
    runner = ListProblem(given, compiled=False).forward
    assert [runner(forward, reserve)[0] > 0 for reserve in range(3)] == [False, True, True]


def test_library_orders_of_the_same_placement_are_starts() -> None:
    given = problem("hanayo", None, split=True, P=4, M=8, w=1)
    known = dict(same_placement(given.schedule.placement, 8))
    assert {"hanayo", "zb_wave", "zbv", "vhalf", "vmin"} <= known.keys()
    assert "interleaved_1f1b" not in known
    starts = dict(known_starts(given, [*known.items()]))
    assert starts.keys() == known.keys()
    for start in starts.values():
        assert (start[given.after] >= start[given.before]).all()
    took = {name: simulate(with_cell_order(given, start_order(start))).makespan for name, start in starts.items()}
    assert took["zbv"] == simulate(known["zbv"]).makespan
    assert took["zbv"] < took["hanayo"] < simulate(known["hanayo"]).makespan  # its inputs no longer wait for a W


def test_the_library_is_opened_at_every_number_of_stages_per_rank() -> None:
    sized = [(each.name, each.per_rank) for each in library_at(4, 8)]
    assert {("zb_wave", 8), ("zb_wave_odd", 3), ("dualpipev", 2), ("1f1b", 1), ("looped_bfs", 5)} <= set(sized)
    assert not [name for name, _ in sized if name == "seq1f1b"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [12, 16])
def test_waves_meet_their_floor_under_caps(memory: int) -> None:
    """One more wave than ZB-V on four ranks, with 12 of 16 chunks: the solver alone gave 152."""
    needed("numba")
    facts: dict[str, Any] = json.loads(
        CliRunner()
        .invoke(main, f"tune hanayo -D P=4 -D M=12 -D w=2 --split --memory {memory / 4} --json".split())
        .stdout
    )
    assert (facts["found"]["makespan"], facts["lower_bound"], facts["proven"]) == (163 - memory, 163 - memory, True)
    assert facts["search"] is None
    assert max(facts["found"]["peak_memory"]) <= memory
