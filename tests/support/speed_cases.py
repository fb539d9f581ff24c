"""Ranks that are made slower on purpose while a pipeline trains, and what its watch says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import process_time_ns
from typing import Any, NamedTuple
from unittest import mock

import torch

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline, watch_speed
from schedc_runtime.execute.executor import Executor
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.speed import clock, rule
from schedc_runtime.speed.rule import BASELINE, WINDOW
from schedc_runtime.speed.watch import SpeedWatch

SLOW = 40
"""Steps of a slowdown."""
REST = 2 * WINDOW
"""Steps between two slowdowns, and up to nine more: a slowdown begins anywhere in a window."""


class Slowdown(NamedTuple):
    """A rank takes ``factor`` times as long for instructions of a kind; for all of them where that is empty."""

    rank: int
    kind: str
    factor: float


def make_slower(executor: Executor, kind: str, factor: float) -> list[Any]:
    """Let the instructions of a kind burn more processor time. Returns the calls as they were."""
    calls = executor.code.calls
    kept = list(calls)

    def slower(registers: Any, both: Any) -> bool | None:
        handler, operands = both
        begin = process_time_ns()
        blocked = handler(registers, operands)
        end = process_time_ns()
        until = end + (end - begin) * (factor - 1)
        while process_time_ns() < until:
            pass
        return bool(blocked)

    for position, step in enumerate(executor.code.steps):
        if step.instruction.computes and kind in ("", step.instruction.kind_name):
            calls[position] = (slower, kept[position])
    return kept


def watched_training(
    rank: int,
    size: int,
    slowdowns: Sequence[Sequence[Any]],
    windows: int,
    width: int = 64,
    length: int = 32,
    baseline: int = BASELINE,
) -> dict[str, Any]:
    """The false alarms of some quiet windows, and for each slowdown the alarms up to the end of its last window."""
    with short_baseline(baseline) if baseline < BASELINE else nullcontext():
        return _trained(rank, size, slowdowns, windows, width, length)


def _trained(
    rank: int, size: int, slowdowns: Sequence[Sequence[Any]], windows: int, width: int, length: int
) -> dict[str, Any]:
    program = compile_schedule("dualpipev", P=size, M=2 * size)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=width, heads=2, blocks=2 * size, vocab=32))
    batch, targets = torch.randint(0, 32, (2 * size, length)), torch.randint(0, 32, (2 * size, length))
    pipe = Pipeline(model, program, loss_fn=next_token_loss, example=batch)
    lines: list[str] = []
    watch = watch_speed(pipe, lines.append)

    def alarms(count: int) -> list[Any]:
        before = len(watch.alarms)
        for _ in range(count):
            pipe.step(batch, targets)
            pipe.zero_grad()
        return [[alarm.rank, alarm.kind, alarm.factor, alarm.since] for alarm in watch.alarms[before:]]

    alarms(1)
    while stream_of(watch).rule is None:
        alarms(1)
    quiet = alarms(windows * WINDOW)
    found = []
    for number, slow in enumerate(Slowdown(*each) for each in slowdowns):
        offset = 7 * number % WINDOW
        quiet += alarms(REST + offset)
        executor = stream_of(watch).clocks[0].executor
        kept = make_slower(executor, slow.kind, slow.factor) if slow.rank == rank else executor.code.calls
        begin = pipe.steps
        during = alarms(SLOW)
        executor.code.calls[:] = kept
        found.append([begin, during + alarms(WINDOW - offset)])
    pipe.close()
    return {"quiet": quiet, "found": found, "lines": lines}


@contextmanager
def short_baseline(steps: int) -> Iterator[None]:
    """Baselines of so few steps are taken as they are."""
    with mock.patch.multiple(clock, BASELINE=steps), mock.patch.multiple(rule, SETTLED=100.0):
        yield


def stream_of(watch: SpeedWatch) -> Any:
    """The stream of the last step."""
    assert watch._current is not None
    return watch._current
