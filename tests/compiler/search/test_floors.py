"""Floors are never above the best order, have the figures of the formulas, and say which rank they come from."""

from __future__ import annotations

import json
from importlib import import_module
from random import Random
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.search.bounds import OpWindows
from schedc.search.floors import RankFloor, most_work, rank_floors
from schedc.search.problem import Freedom, SearchProblem, problem_of
from schedc.search.solver import Effort
from schedc.search.tune import tune
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from support.needs import needed
from support.paths import ROOT

EQUAL = Costs()


def floor_of(
    name: str, cap: float | None = None, costs: Costs = EQUAL, split: bool = False, **sizes: int
) -> tuple[SearchProblem, RankFloor]:
    """The largest floor of a schedule's ops. cap: memory of each rank; None for what each holds."""
    schedule = legal_schedule(open_input(name), sizes)
    caps = measure_memory(schedule, costs).peak_memory if cap is None else np.full(schedule.ranks, cap)
    problem = problem_of(schedule, costs, caps, Freedom(split=split))
    return problem, max(rank_floors(OpWindows(problem)), key=lambda floor: floor.makespan)


@pytest.mark.slow
def test_no_floor_is_above_the_best_order_of_random_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than `benchmarks/frontier.py floors` tries; each is decided by the solver without a bound of ours."""
    needed("ortools")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    facts = import_module("frontier").measured_floors(range(2000, 2040), Effort(None, 5.0, workers=1))
    assert facts["failed"] == 0, facts["examples"]
    assert facts["undecided"] <= 4
    assert facts["on_floor"] >= 8
    assert facts["above_carlier"] >= 4


KNOWN: list[tuple[str, dict[str, Any], float]] = [
    ("vhalf", {"P": 8, "M": 16}, 113),
    ("vhalf", {"P": 5, "M": 10}, 71),
    ("vmin", {"P": 8, "M": 16, "cap": 8}, 119),
    ("dualpipev", {"P": 4, "M": 8}, 52),
    ("dualpipev", {"P": 4, "M": 8, "cap": 8}, 54),
    ("hanayo", {"P": 4, "M": 12, "w": 2, "split": True, "cap": 12}, 151),
    *[("hanayo", {"P": 8, "M": 24, "w": 2, "split": True, "cap": cap}, floor)
      for cap, floor in ((16, 319), (20, 307), (24, 303), (28, 299), (32, 295), (None, 295))],
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "expected"), KNOWN)
def test_floors_are_those_of_the_two_windows(name: str, given: dict[str, Any], expected: float) -> None:
    problem, floor = floor_of(name, **given)
    assert problem.cost(floor.makespan) == expected


@pytest.mark.parametrize("name", ["1f1b", "zbh1", "vhalf", "zb_wave", "zb_wave_odd"])
def test_orders_that_are_the_best_at_their_memory_meet_the_floor(name: str) -> None:
    problem, floor = floor_of(name, P=4, M=8)
    assert problem.cost(floor.makespan) == simulate(legal_schedule(open_input(name), {"P": 4, "M": 8})).makespan


def test_1f1b_meets_the_floor_of_every_rank_for_costs_that_are_no_ones() -> None:
    costs = Costs(F=3, I=2, W=5)
    schedule = legal_schedule(open_input("1f1b"), {"P": 5, "M": 9})
    problem = problem_of(schedule, costs, measure_memory(schedule, costs).peak_memory, Freedom())
    known = rank_floors(OpWindows(problem))
    assert [problem.cost(floor.makespan) for floor in known] == [simulate(schedule, costs).makespan] * 5
    assert [(problem.time.cost(floor.before), problem.time.cost(floor.behind)) for floor in known] == [
        (rank * 3 + (4 - rank) * 7, (4 - rank) * 3 + rank * 7) for rank in range(5)
    ]


def test_what_a_pending_weight_gradient_holds_weakens_the_second_window() -> None:
    """V-Half's last rank: 4 chunks fit, each with I and W left, or the weight gradients of 16 chunks."""
    equal, less = (floor_of("vhalf", 4, Costs(pending_weight=held), P=4, M=8)[1] for held in (1.0, 0.25))
    assert (equal.filled, equal.left, equal.idle) == (4, 8, 11)
    assert (less.filled, less.left, less.idle) == (4, 16, 7)


def test_a_weight_gradient_may_fill_what_is_left_beside_whole_items() -> None:
    """3 fit: an activation of 2 with I and W left, and a pending weight gradient of 1. The best order takes 33."""
    costs = Costs(F=1, I=3, W=1, FB=5, activation=2, pending_weight=1)
    problem, floor = floor_of("gpipe", 3, costs, split=True, P=4, M=2)
    assert floor.left == 6  # one and a half whole items; 5 is the most of whole parts
    assert problem.cost(floor.makespan) <= 33


def test_the_windows_overlap_where_all_activations_fit() -> None:
    """GPipe holds everything: the floor is its start and its end, and not both windows."""
    _, floor = floor_of("gpipe", P=4, M=8)
    assert not floor.apart
    assert (floor.starts, floor.ends, floor.idle) == (3, 6, 9)
    assert floor_of("1f1b_overlap", 9, P=4, M=6)[1].apart  # a kept pair has its F behind the first backward


def test_no_selection_of_parts_works_more_than_the_knapsack_says() -> None:
    draw = Random(5)
    for _ in range(300):
        parts = draw.randrange(1, 9)
        memory = np.array([draw.choice((0, 1, 2, 3, 6)) for _ in range(parts)])
        work = np.array([draw.randrange(9) for _ in range(parts)])
        capacity = draw.randrange(16)
        chosen = (np.arange(2**parts)[:, None] >> np.arange(parts)) & 1
        best = int((chosen @ work)[chosen @ memory <= capacity].max())
        assert best <= most_work(memory, work, capacity)
        if set(memory.tolist()) <= {0, 3}:
            assert best == most_work(memory, work, capacity)


def test_tune_proves_a_seed_on_its_floor_without_a_search() -> None:
    schedule = legal_schedule(open_input("vhalf"), {"P": 8, "M": 16})
    tuned = tune(schedule, EQUAL, caps=measure_memory(schedule).peak_memory)
    assert (tuned.origin, tuned.search, tuned.proven, tuned.bound) == ("seed", None, True, 113)
    assert tuned.floor is not None
    assert tuned.floor.rank == 7


@pytest.mark.slow
def test_a_report_says_what_check_says_of_each_rank() -> None:
    def facts(*command: str) -> dict[str, Any]:
        given: dict[str, Any] = json.loads(CliRunner().invoke(main, [*command, *size, *costs, "--json"]).stdout)[
            "floor"
        ]
        return given

    size, costs = ["-D", "P=2", "-D", "M=4"], ["--cost", "F=1,2", "--cost", "p2p=0.1"]
    told = facts("report", "gpipe")
    assert told == {"sizes": {"P": 2, "M": 4}, **facts("check", "gpipe", "--floor")}
    text = CliRunner().invoke(main, ["report", "gpipe", *size, *costs]).stdout
    assert f"at P = 2, M = 4: floor of the makespan {told['makespan']:g}" in text
    for rank in told["ranks"]:
        assert (
            f"  rank {rank['rank']}: {rank['makespan']:g}, idles for {rank['bubble']:g} at least: {rank['why']}" in text
        )
    assert told["ranks"][0]["makespan"] != told["ranks"][1]["makespan"]


def test_check_prints_the_floor_and_refuses_what_it_does_not_hold_for() -> None:
    command = ["check", "vhalf", "-D", "P=8", "-D", "M=16", "--floor"]
    text = CliRunner().invoke(main, command).output
    assert "floor of the makespan 113 (reached: no order is shorter), by rank 7" in text
    assert "before its first backward, at 23 or later, it runs forwards for 10 at most, as its memory of 5 " in text
    facts = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)["floor"]
    assert [rank["rank"] for rank in facts["ranks"]] == list(range(8))
    assert max(rank["makespan"] for rank in facts["ranks"]) == facts["makespan"] == 113
    sweep = CliRunner().invoke(main, ["check", "1f1b", "--floor", "--sweep", "P<=2, M<=2"])
    assert (sweep.exit_code, "without --sweep" in sweep.output) == (2, True)
    cells = CliRunner().invoke(main, ["check", "dualpipev", "--floor", "--cost-file", "examples/costs/cells.toml"])
    assert (cells.exit_code, "no cells" in cells.output) == (2, True)
