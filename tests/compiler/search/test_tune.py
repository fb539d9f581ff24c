"""Tuned orders: bounds against every order of small cases, caps, seeds, repeatability, and the command."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input, open_order
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.search.bounds import OpWindows, combinatorial_bound
from schedc.search.problem import Freedom, cap_unit, problem_of
from schedc.search.solver import Effort
from schedc.search.split import split_backwards
from schedc.search.ticks import grid_for
from schedc.search.tune import MAX_OPS, TuningResult, tune, with_cell_order
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from support.commands import facts_of
from support.needs import needed
from support.paths import ROOT
from support.random_schedules import random_schedule
from support.sweeps import halved

needed("ortools")

QUICK = Effort(seconds=None, work=2.0, workers=1)
SPLIT = Freedom(split=True)


def library(name: str, **sizes: int) -> Schedule:
    return legal_schedule(open_input(name), sizes)


def own_peaks(schedule: Schedule, costs: Costs) -> np.ndarray:
    return measure_memory(schedule, costs).peak_memory


# Every order of a small case, microbatches in any sequence, on two ranks with one stage each.


def every_order(schedule: Schedule) -> Iterator[Schedule]:
    """All permutations of a schedule's ops on each rank that are legal."""
    problem = problem_of(schedule, Costs(), None, Freedom())
    bounds = schedule.rank_start
    ranks = [list(_sequences(schedule, list(range(bounds[r], bounds[r + 1])))) for r in range(schedule.ranks)]
    for sequence in product(*ranks):
        candidate = with_cell_order(problem, [cell for rank in sequence for cell in rank])
        if not Dependencies.of(candidate).levels.stuck.size:
            yield candidate


def _sequences(schedule: Schedule, rows: list[int]) -> Iterator[list[int]]:
    if not rows:
        yield []
    for row in rows:
        same = [r for r in rows if schedule.microbatch[r] == schedule.microbatch[row]]
        if row == min(same):  # the ops of a microbatch on a stage keep their order: F, I, W
            for rest in _sequences(schedule, [r for r in rows if r != row]):
                yield [row, *rest]


EXHAUSTIVE = [
    ({}, 2, None, "makespan"),
    ({"W": 0.25, "p2p": 0.5}, 2, None, "makespan"),
    ({"F": (1.0, 2.0), "W": (0.1, 1 / 3)}, 2, 1, "makespan"),
    ({"F": (2.0, 0.5), "I": (0.7, 1.1), "pending_weight": 0.5}, 2, 1.5, "makespan"),
    ({"W": 0.0, "p2p": 0.3}, 2, 2, "makespan"),
    ({"F": (1.0, 0.0), "I": 0.0, "W": (1.0, 2.0)}, 2, None, "span"),
    ({"F": (1.0, 2.0), "I": 0.6, "p2p": 0.2}, 2, 1, "span"),
    ({"F": math.sqrt(2), "W": math.pi, "p2p": 1 / 7.3}, 2, None, "makespan"),
]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("costs", "microbatches", "cap", "objective"), halved(EXHAUSTIVE))
def test_the_result_is_the_best_of_all_orders(
    costs: dict[str, Any], microbatches: int, cap: float, objective: str
) -> None:
    priced = Costs(**costs)
    seed = split_backwards(library("gpipe", P=2, M=microbatches))
    assert check_schedule(seed) == []
    caps = None if cap is None else np.full(2, float(cap))
    best = math.inf
    for order in every_order(seed):
        timeline = simulate(order, priced)
        if caps is None or (own_peaks(order, priced) <= caps + 1e-9).all():
            best = min(best, timeline.makespan if objective == "makespan" else timeline.span.max())
    tuned = tune(seed, priced, caps=caps, objective=objective, effort=QUICK)
    assert tuned.problem.limits == ()
    assert tuned.best.value == pytest.approx(best, rel=1e-12)
    assert tuned.bound == pytest.approx(best, rel=1e-7 if not tuned.problem.time.exact else 1e-12)
    assert tuned.bound <= best * (1 + 1e-12)


def test_weight_gradients_and_microbatches_may_be_exchanged() -> None:
    """Three microbatches on the last of two ranks: the sequence of a stage is kept, and nothing is lost."""
    costs = Costs(F=(0.5, 1.0), I=(2.0, 0.7), W=(1.0, 0.4))
    seed = split_backwards(library("1f1b", P=2, M=2))
    best = min(simulate(order, costs).makespan for order in every_order(seed))
    assert tune(seed, costs, effort=QUICK).best.value == pytest.approx(best)


# Known optima.


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (3, 3), (3, 7)])
def test_1f1b_is_known_to_be_best_without_search(ranks: int, microbatches: int) -> None:
    seed, costs = library("1f1b", P=ranks, M=microbatches), Costs(F=1.0, B=2.5)
    tuned = tune(seed, costs, caps=own_peaks(seed, costs))
    assert (tuned.search, tuned.origin, tuned.proven) == (None, "seed", True)
    assert tuned.bound == tuned.best.value == (microbatches + ranks - 1) * 3.5


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.1])
def test_zbh1s_bubble_is_the_least_in_its_memory(weight: float) -> None:
    seed, costs = library("zbh1", P=3, M=5), Costs(W=weight)
    tuned = tune(seed, costs, caps=own_peaks(seed, costs), effort=QUICK)
    assert tuned.proven
    assert tuned.bound == pytest.approx(5 * (2 + weight) + 2 * (2 - weight))


def test_splitting_1f1b_frees_a_bubble_in_the_same_memory() -> None:
    """What is split although it did not pay is whole again."""
    seed, costs = library("1f1b", P=4, M=8), Costs()
    tuned = tune(seed, costs, caps=own_peaks(seed, costs), freedom=SPLIT, effort=QUICK)
    assert (tuned.seed.value, tuned.best.value, tuned.proven) == (33.0, 30.0, True)
    assert (tuned.best.peak <= tuned.seed.peak).all()
    count = np.bincount(tuned.best.schedule.kind, minlength=4)
    assert count[OpKind.I] == count[OpKind.W] < 8 < count[OpKind.B]


def test_uneven_stages_gain_from_the_search_itself() -> None:
    seed = library("1f1b", P=4, M=8)
    costs = Costs(F=(1.0, 1.0, 1.6, 1.0), p2p=0.1)
    tuned = tune(seed, costs, caps=own_peaks(seed, costs), freedom=SPLIT, effort=Effort(5.0, workers=4))
    assert tuned.best.value < tuned.seed.value * 0.92
    assert tuned.gap < 0.02


# Caps.


def test_less_memory_than_the_seed_has_costs_time_and_is_kept() -> None:
    seed = library("1f1b", P=3, M=6)
    values = []
    for cap in (3.0, 2.0, 1.0):
        tuned = tune(seed, Costs(), caps=np.full(3, cap), effort=QUICK)
        assert (tuned.best.peak <= cap).all()
        assert tuned.seed.fits == (cap >= 3)
        values.append(tuned.best.value)
    assert values[0] < values[1] < values[2] == 6 * 9.0
    assert tune(seed, Costs(), effort=QUICK).best.value <= values[0]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", halved(["1f1b", "zbv", "dualpipe", "interleaved_1f1b"]))
def test_the_least_memory_that_is_named_suffices(name: str) -> None:
    seed, costs = library(name, P=4, M=8), Costs(pending_weight=1.5)
    kinds = Freedom(keep_pairs=False)
    with pytest.raises(DiagnosticError) as error:
        tune(seed, costs, caps=np.full(4, 0.9), freedom=kinds)
    (found,) = error.value.diagnostics
    assert found.code == "S407"
    assert "exists" in found.message
    named = found.help.split("least: ")[1].split(" on")[0]
    caps = np.array([float(part) for part in named.split(",")]) * cap_unit(seed, costs).size
    quick = Effort(seconds=None, work=0.01, workers=1)
    assert (tune(seed, costs, caps=caps, freedom=kinds, effort=quick).best.peak <= caps).all()
    for rank in range(4):
        with pytest.raises(DiagnosticError, match="S407"):
            tune(seed, costs, caps=caps - 0.1 * (np.arange(4) == rank), freedom=kinds)


def test_a_cap_below_what_kept_pairs_hold_is_refused_with_the_reason() -> None:
    seed = library("1f1b_overlap", P=2, M=4)
    with pytest.raises(DiagnosticError) as error:
        tune(seed, Costs(FB=2.5), caps=np.ones(2), effort=QUICK)
    assert error.value.diagnostics[0].code == "S407"
    assert "pairs of the seed are kept" in error.value.diagnostics[0].notes[0]


def test_split_backwards_that_hold_more_are_said_to_be_a_limit() -> None:
    seed = library("1f1b", P=2, M=4)
    assert problem_of(seed, Costs(pending_weight=0.5), None, SPLIT).limits == ()
    for costs in (Costs(pending_weight=1.5), Costs(B=1.5)):
        assert problem_of(seed, costs, None, SPLIT).limits == ("every backward split",)


def test_too_many_ops_are_refused() -> None:
    with pytest.raises(DiagnosticError, match="S408"):
        tune(library("1f1b", P=8, M=MAX_OPS // 16 + 1), Costs())
    with pytest.raises(DiagnosticError, match="S408"):
        tune(library("1f1b", P=8, M=MAX_OPS // 24 + 1), Costs(), freedom=SPLIT)


# Any schedule, any costs.


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("number", halved(range(24)))
def test_the_result_is_legal_within_the_cap_and_never_worse(number: int) -> None:
    seed, draw = random_schedule(number), random.Random(number)

    def some() -> tuple[float, ...]:
        return tuple(draw.choice([0.0, 0.1, 1 / 3, 0.5, 1.0, 2.0]) for _ in range(seed.stages))

    costs = Costs(F=some(), I=some(), W=some(), FB=draw.choice([None, 1.5]), p2p=draw.choice([0.0, 0.3]),
                  activation=some(), pending_weight=some())  # fmt: skip
    freedom = Freedom(keep_pairs=draw.random() < 0.5, split=draw.random() < 0.5)
    caps = own_peaks(seed, costs)
    objective = draw.choice(["makespan", "span"])
    quick = Effort(seconds=None, work=0.05, workers=1)
    tuned = tune(seed, costs, caps=caps, objective=objective, freedom=freedom, effort=quick)
    best = tuned.best.schedule
    assert check_schedule(best) == []
    assert (own_peaks(best, costs) <= caps * (1 + 1e-9)).all()
    timeline = simulate(best, costs)
    value = timeline.makespan if objective == "makespan" else timeline.span.max()
    assert tuned.bound <= value == tuned.best.value <= tuned.seed.value
    if not freedom.split:
        assert sorted(_ops(best)) == sorted(_ops(seed))


def _ops(schedule: Schedule) -> list[tuple[int, ...]]:
    columns = (schedule.rank, schedule.kind, schedule.stage, schedule.microbatch)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_segments_keep_their_sequence() -> None:
    """A segment of a sequence attends to those before it: no order may exchange them."""
    seed = library("seq1f1b")
    tuned = tune(seed, Costs(p2p=0.5), effort=QUICK)
    assert any("sequence" in text for text in tuned.problem.limits)
    for kind in (OpKind.F, OpKind.B):
        for stage in range(seed.stages):
            sequences = [s.microbatch[(s.kind == kind) & (s.stage == stage)] for s in (seed, tuned.best.schedule)]
            assert np.array_equal(*sequences)


def test_the_bound_is_never_above_an_order_of_the_problem() -> None:
    for number in range(60):
        seed = random_schedule(number)
        problem = problem_of(seed, Costs(W=0.5), own_peaks(seed, Costs(W=0.5)), Freedom())
        windows = OpWindows(problem)
        timeline = simulate(seed, Costs(W=0.5))
        assert problem.cost(combinatorial_bound(windows, "makespan")) <= timeline.makespan + 1e-9
        assert problem.cost(combinatorial_bound(windows, "span")) <= timeline.span.max() + 1e-9


@pytest.mark.parametrize(
    ("values", "ticks"), [((1.0, 2.0), 1), ((0.1, 1.9 + 1.2), 10), ((1 / 3, 0.5), 6), ((math.pi, 1.0), None)]
)
def test_costs_become_whole_ticks_where_they_can(values: tuple[float, ...], ticks: int | None) -> None:
    grid = grid_for(np.array(values), 100.0)
    assert grid.exact == (ticks is not None)
    if ticks is not None:
        assert grid.ticks == ticks
        assert grid.down(np.array(values)).tolist() == [round(value * ticks) for value in values]
    else:
        assert (grid.down(np.array(values)) <= np.array(values) * grid.ticks).all()


@pytest.mark.slow
def test_effort_instead_of_time_gives_the_same_order_again() -> None:
    seed = library("interleaved_1f1b", P=4, M=8)
    costs = Costs(F=(1.3, 1, 1, 1, 1, 1, 1, 2))
    again: list[TuningResult] = [
        tune(seed, costs, caps=own_peaks(seed, costs), freedom=SPLIT, effort=Effort(None, 0.5, workers=4))
        for _ in range(2)
    ]
    assert again[0].search is not None
    assert again[0].best.schedule == again[1].best.schedule
    assert again[0].bound == again[1].bound


# The command.


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_one_rank_has_a_reason_too() -> None:
    assert (
        "rank 0 idles for 0 at least: it may run all the time"
        in schedc("tune", "gpipe", "-D", "P=1", "-D", "M=2").output
    )


def test_a_floor_of_split_backwards_is_not_told_of_shorter_whole_ones() -> None:
    ways = [schedc("tune", "1f1b", "--split", *costs).output for costs in ((), ("--cost", "B=1.2"))]
    assert ["the bound is a floor" in output for output in ways] == [True, False]
    assert ["with its backwards split or not" in output for output in ways] == [True, False]
    assert "with this in common: every backward split" in ways[1]


def test_the_order_that_is_written_stands_for_a_schedule_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "found.order"
    result = schedc("tune", "1f1b", "-D", "P=3", "-D", "M=6", "--split", "-o", str(path), "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["schema"], facts["proven"], facts["improved"]) == ("schedc.tune", True, True)
    assert facts["found"]["makespan"] == facts["lower_bound"] < facts["seed"]["makespan"]
    order = open_order(path).schedule
    assert simulate(order).makespan == facts["found"]["makespan"]
    assert own_peaks(order, Costs()).tolist() == facts["found"]["peak_memory"]
    checked = json.loads(schedc("check", str(path), "--json").stdout)
    assert checked["makespan"] == facts["found"]["makespan"]
    assert schedc("show", str(path), "-o", str(tmp_path / "found.svg")).exit_code == 0
    assert schedc("compile", str(path), "-o", str(tmp_path / "build")).exit_code == 0
    again = schedc("tune", str(path))
    assert "there is no better order" in again.output


def test_a_refusal_is_a_finding_and_also_json() -> None:
    result = schedc("tune", "zbv", "-D", "P=2", "-D", "M=4", "--memory", "0.5", "--json")
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["diagnostics"]
    assert (found["code"], found["line"], found["column"]) == ("S407", 0, 0)
    assert "the least: 1, 1" in found["help"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--memory", "much"), ("--memory", "1,2"), ("--memory", "nan"), ("--time", "0"),
        ("--time", "3", "--effort", "3"), ("--cost-file", str(ROOT / "examples" / "costs" / "cells.toml")),
    ],
)  # fmt: skip
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    result = schedc("tune", "1f1b", *arguments)
    assert result.exit_code == 2, result.output


def test_the_cap_is_in_microbatches_of_a_rank_as_in_compare() -> None:
    """A microbatch of ZB-V holds two chunks of a rank; the former unit, chunks, is taken with a note."""
    size, few = ("-D", "P=4", "-D", "M=8"), ("--effort", "0.01", "--workers", "1")
    held = facts_of("compare", "zbv", *size)["schedules"][0]["memory"]
    facts = facts_of("tune", "zbv", *size, "--memory", f"{held:g}", *few)
    assert (facts["memory"], facts["memory_unit"]) == ([held * 2] * 4, 2)
    assert max(facts["seed"]["peak_memory"]) == held * 2
    new, old = (schedc("tune", "zbv", *size, "--memory", text, *few) for text in (f"{held:g}", f"{held * 2:g}chunks"))
    assert [line for line in new.stdout.splitlines() if line.startswith("   ")] == [
        line for line in old.stdout.splitlines() if line.startswith("   ")
    ]
    assert f"`{held:g}chunks` is what `{held:g}` was" in new.stderr
    assert f"note: `--memory {held * 2:g}chunks` is now `--memory {held:g}`" in old.stderr
    weighed = facts_of("tune", "zbv", *size, "--memory", "40", "--cost", "activation=5", *few)
    assert (weighed["memory"], weighed["memory_unit"]) == ([40] * 4, 1)
    assert facts_of("tune", "seq1f1b", "--memory", "2", *few)["memory_unit"] == 2
    thirds = facts_of("tune", "interleaved_1f1b", *size, "-D", "v=3", "--memory", "2.33333", *few)
    assert thirds["memory"] == [7] * 4
