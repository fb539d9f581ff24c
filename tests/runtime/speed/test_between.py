"""A rank that waits for its data between steps is named, and ranks that wait for it are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from schedc_runtime.speed import between
from schedc_runtime.speed.between import LEAST, PauseClock, UsualPauses
from schedc_runtime.speed.rule import ALL, BASELINE, BETWEEN, SLOWER, WINDOW, Alarm, SpeedRule
from schedc_runtime.testing import pool

RANKS, STEP, USUAL = 4, 100e6, 3e6
"""Ranks, nanoseconds of a step, and of the usual time between two."""
Late = Callable[[int, int], float]
"""By step and rank: nanoseconds more than usual."""


def ratios(late: Late, count: int, seed: int, period: float = STEP) -> list[dict[str, list[float]]]:
    """Steps of ranks whose time between steps is noise and, in a tenth of them, 30 ms of something else."""
    draw = random.Random(seed)
    columns = []
    for rank in range(RANKS):
        usual = UsualPauses()

        def pause(more: float) -> tuple[int, int]:
            return round(USUAL * draw.lognormvariate(0, 0.5) + more + 30e6 * (draw.random() < 0.1)), round(period)

        for _ in range(BASELINE):
            usual.add(pause(0.0))
        usual.settle()
        for step in range(count):
            usual.add(pause(late(step, rank)))
        columns.append(usual.take())
    return [{BETWEEN: list(values)} for values in zip(*columns, strict=True)]


def alarms(late: Late, count: int = 10 * WINDOW, seed: int = 0, period: float = STEP) -> list[Alarm]:
    rule = SpeedRule([])
    return [alarm for number, step in enumerate(ratios(late, count, seed, period)) for alarm in rule.step(number, step)]


def test_a_rank_whose_data_are_late_is_named_with_its_share_of_a_step() -> None:
    for seed in range(20):
        found = alarms(lambda step, rank: 25e6 if step >= 30 and rank == 2 else 0.0, seed=seed)
        assert [(alarm.rank, alarm.kind, alarm.drift) for alarm in found] == [(2, BETWEEN, False)]
        assert 1.20 < found[0].factor < 1.32
        assert 30 <= found[0].since <= 40
    told = found[0].told("rank 2")
    assert told.startswith("rank 2 takes 2")
    assert "% of a step longer between steps than usual, since step 3" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "period"),
    [
        (lambda _step, _rank: 0.0, STEP),
        (lambda _step, _rank: 40e6, STEP),
        (lambda step, rank: 0.8 * (SLOWER - 1) * STEP if rank == 1 else 0.0, STEP),
        (lambda step, rank: 40e6 if rank == 1 and 30 <= step < 40 else 0.0, STEP),
        (lambda step, rank: 40e6 if rank == 1 and step % 4 == 0 else 0.0, STEP),
        (lambda step, rank: 0.3 * LEAST if rank == 1 else 0.0, 5e6),
    ],
    ids=["noise", "all ranks", "less than a tenth", "one window", "each fourth step", "less than the least"],
)
def test_what_is_no_starving_rank_raises_no_alarm(late: Late, period: float) -> None:
    assert [alarm for seed in range(20) for alarm in alarms(late, 30 * WINDOW, seed, period)] == []


def test_a_slow_rank_and_a_late_one_are_both_named() -> None:
    rule, draw = SpeedRule([{"F": [0.0] * RANKS}] * BASELINE), random.Random(1)
    found: list[Alarm] = []
    for number in range(6 * WINDOW):
        step: dict[str, list[float | None]] = {
            kind: [draw.gauss(0.3 * (rank == 1), 0.02) for rank in range(RANKS)] for kind in "FIW"
        }
        step[BETWEEN] = [0.3 * (rank in (1, 3) and number >= 2 * WINDOW) for rank in range(RANKS)]
        found += rule.step(number, step)
    assert {(alarm.rank, alarm.kind) for alarm in found if not alarm.drift} == {(1, ALL), (1, BETWEEN), (3, BETWEEN)}
    assert len(found) == len({alarm[:2] for alarm in found})


def test_waits_for_others_and_time_without_a_core_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, int] = {"wall": 1000, "off": 50}
    control: Any = SimpleNamespace(waited=7)
    monkeypatch.setattr(between, "perf_counter_ns", lambda: now["wall"])
    monkeypatch.setattr(between, "time_off_core", lambda: now["off"])
    clock = PauseClock(control)
    clock.begin()
    clock.end()
    now["wall"] += 500
    control.waited += 100
    now["off"] += 30
    clock.begin()
    now["wall"] += 2000
    assert clock.last() == (370, 2500)


@pytest.mark.processes
@pytest.mark.slow
def test_processes_name_the_rank_whose_loader_sleeps() -> None:
    late = 0.05
    everyone = pool(2).run("support.speed_cases:watched_loaders", seconds=late, timeout=120)
    assert everyone[0]["found"] == everyone[1]["found"]
    assert not [alarm for alarm in everyone[0]["quiet"] if alarm[1] == BETWEEN]
    (found,) = (alarm for alarm in everyone[0]["found"] if alarm[1] == BETWEEN)
    assert found[0] == 1
    assert found[2] > 1 + 0.5 * late / everyone[0]["period"], "the factor counts in steps, whatever a step takes here"
    assert any(line.startswith("rank 1 takes") and BETWEEN in line for line in everyone[0]["lines"])
