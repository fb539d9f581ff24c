"""Ranks that become slower are named with their kind of instruction, and nobody else is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from math import exp, log

import pytest
import torch

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline, watch_speed
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.speed.rule import ALL, BASELINE, SLOWER, WARMING, WINDOW, Alarm, SpeedRule, moved
from schedc_runtime.speed.watch import check_watchable
from schedc_runtime.testing import pool
from support.runtime_cases import model_for, tokens
from support.speed_cases import make_slower, short_baseline, stream_of
from support.sweeps import in_sweeps, thinned

RANKS = 4
Slow = Callable[[int, int, str], float]
"""By step, rank and kind: the factor of a time."""


def steps(count: int, slow: Slow = lambda *_: 1.0, noise: float = 0.05, seed: int = 0) -> Iterator[dict]:
    """Ratios of ranks whose machine is slower in some steps for all; W runs on all ranks but the last."""
    draw = random.Random(seed)
    for step in range(count):
        common = draw.choice([0.0, 0.0, 0.3])
        kinds = {}
        for kind in ("F", "I", "W"):
            ranks = [log(slow(step, rank, kind)) + common + draw.gauss(0, noise) for rank in range(RANKS)]
            kinds[kind] = [None if (rank, kind) == (3, "W") else value for rank, value in enumerate(ranks)]
        yield kinds


def alarms(count: int, slow: Slow = lambda *_: 1.0, noise: float = 0.05, seed: int = 0) -> list[Alarm]:
    rule = SpeedRule(list(steps(BASELINE, noise=noise, seed=seed + 1000)))
    return [alarm for number, step in enumerate(steps(count, slow, noise, seed)) for alarm in rule.step(number, step)]


@pytest.mark.slow
def test_quiet_ranks_raise_no_alarm_whatever_slows_all_of_them():
    assert [alarm for seed in range(40) for alarm in alarms(50 * WINDOW, seed=seed)] == []


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "rank", "kind"), thinned([(1.25, 0, "F"), (1.5, 3, "F"), (1.25, 1, "W"), (2.0, 2, "W")], 3)
)
def test_a_slow_rank_is_named_once_with_kind_factor_and_beginning(factor, rank, kind):
    for seed in range(20):
        found = alarms(100, lambda step, *key: factor if step >= 30 and key == (rank, kind) else 1.0, seed=seed)
        assert [(alarm.rank, alarm.kind) for alarm in found] == [(rank, kind)]
        assert abs(found[0].factor - factor) < 0.12 * factor
        assert 30 <= found[0].since <= 50


def test_one_slow_window_is_no_alarm_and_a_second_slowdown_is_told_again():
    assert alarms(100, lambda step, rank, kind: 1.5 if rank == 1 and 30 <= step < 40 else 1.0) == []
    found = alarms(120, lambda step, rank, kind: 1.5 if (rank, kind) == (1, "F") and step // 30 in (1, 3) else 1.0)
    assert [(alarm.rank, alarm.kind, alarm.since // 30) for alarm in found] == [(1, "F", 1), (1, "F", 3)]


def test_a_rank_that_is_slow_in_all_its_kinds_is_named_once_as_a_whole():
    for seed in range(20):
        found = alarms(100, lambda step, rank, _: 1.25 if step >= 35 and rank == 1 else 1.0, seed=seed)
        assert {alarm.rank for alarm in found} == {1}
        assert [alarm.kind for alarm in found].count(ALL) == 1
        assert found[-1].kind == ALL  # no kind is named behind it
        assert 30 <= found[-1].since <= 50


def test_a_drift_under_much_noise_is_found_by_the_sum():
    found = [alarms(300, lambda step, rank, _: 1 + step / 1500 if rank == 2 else 1.0, 0.2, seed) for seed in range(12)]
    assert {alarm.rank for each in found for alarm in each} == {2}
    assert all(any(alarm.kind == ALL for alarm in each) for each in found)
    assert sum(any(alarm.drift for alarm in each) for each in found) >= 10
    assert all(alarm.factor > SLOWER for each in found for alarm in each)
    assert "by a slow drift" in Alarm(2, "F", exp(0.2), 5, drift=True).told("rank 2")


def test_a_baseline_whose_halves_differ_is_not_taken():
    assert all(moved(list(steps(BASELINE, seed=seed))) is None for seed in range(20))
    change = moved(list(steps(BASELINE, lambda step, *key: 1.2 if step >= 60 and key == (1, "I") else 1.0)))
    assert change is not None
    assert (change.rank, change.kind) == (1, "I")
    assert abs(change.factor - 1.2) < 0.05


@in_sweeps(
    "test_ranks_in_one_process_are_told_apart_and_other_batches_have_a_baseline_of_their_own",
    "runtime/speed/test_between.py::test_processes_name_the_rank_whose_loader_sleeps",
)
@pytest.mark.processes
@pytest.mark.slow
def test_processes_name_the_rank_that_burns_more_time():
    everyone = pool(2).run("support.speed_cases:watched_training", slowdowns=[[1, "F", 4.0]], windows=0, timeout=120,
                           width=16, length=8, baseline=60)  # fmt: skip
    assert everyone[0]["found"] == everyone[1]["found"]
    ((begin, found),) = everyone[0]["found"]
    assert any(alarm[:2] == [1, "F"] and alarm[2] > 2 and abs(alarm[3] - begin) <= 2 * WINDOW for alarm in found)
    assert any(line.startswith("rank 1 takes") and "usual time for F" in line for line in everyone[0]["lines"])
    assert not everyone[1]["lines"]


@pytest.mark.slow
@short_baseline(20)
def test_ranks_in_one_process_are_told_apart_and_other_batches_have_a_baseline_of_their_own():
    program = compile_schedule("1f1b", P=3, M=3)
    batch, targets = tokens(3)
    pipe = Pipeline(model_for(program), program, loss_fn=next_token_loss, in_process=True, example=batch)
    lines: list[str] = []
    watch = watch_speed(pipe, lines.append)

    def train(count: int, rows: torch.Tensor, wanted: torch.Tensor) -> None:
        for _ in range(count):
            pipe.step(rows, wanted)
            pipe.zero_grad()

    train(WARMING + 20, batch, targets)
    make_slower(stream_of(watch).clocks[2].executor, "B", 4.0)
    train(2 * WINDOW, batch, targets)
    assert [(alarm.rank, alarm.kind) for alarm in watch.alarms if alarm.factor > 2] == [(2, "B")]
    assert [line for line in lines if line.startswith("rank 2 takes") and "usual time for B" in line]
    train(2, *tokens(3, length=4))
    assert len(watch._streams) == 2
    losses = pipe.step(batch, targets), pipe.evaluate(batch, targets)
    assert all(torch.isfinite(loss) for loss in losses)
    pipe.close()


def test_where_a_host_says_nothing_a_watch_is_refused():
    with pytest.raises(RuntimeFault, match="the pipeline computes on sim"):
        check_watchable("sim", graphs=False)
    with pytest.raises(RuntimeFault, match="steps that are graphs"):
        check_watchable("cpu", graphs=True)
