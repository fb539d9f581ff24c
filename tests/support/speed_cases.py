"""Ranks that are made slower on purpose while a pipeline trains, and what its watch says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import process_time_ns
from typing import Any, NamedTuple

import torch

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline, watch_speed
from schedc_runtime.execute.executor import Executor
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.speed import clock
from schedc_runtime.speed.rule import BASELINE, WARMING, WINDOW
from schedc_runtime.speed.watch import SpeedWatch


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
    """The false alarms of some quiet windows, and for each slowdown the alarms of three windows."""
    clock.BASELINE = baseline
    program = compile_schedule("dualpipev", P=size, M=2 * size)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=width, heads=2, blocks=2 * size, vocab=32))
    batch, targets = torch.randint(0, 32, (2 * size, length)), torch.randint(0, 32, (2 * size, length))
    pipe = Pipeline(model, program, loss_fn=next_token_loss, example=batch)
    lines: list[str] = []
    watch = watch_speed(pipe, lines.append)

    def alarms(count: int) -> list[Any]:
        before = len(watch.alarms)
        for _ in range(count * WINDOW):
            pipe.step(batch, targets)
            pipe.zero_grad()
        return [[alarm.rank, alarm.kind, alarm.factor, alarm.since] for alarm in watch.alarms[before:]]

    for _ in range(WARMING + baseline):
        pipe.step(batch, targets)
        pipe.zero_grad()
    quiet = alarms(windows)
    found = []
    planned = [Slowdown(*each) for each in slowdowns]
    for slow in planned:
        executor = next(_executors(watch))
        kept = make_slower(executor, slow.kind, slow.factor) if slow.rank == rank else executor.code.calls
        begin = pipe.steps
        found.append([begin, alarms(3)])
        executor.code.calls[:] = kept
        if slow is not planned[-1]:
            alarms(2)
    pipe.close()
    return {"quiet": quiet, "found": found, "lines": lines}


def _executors(watch: SpeedWatch) -> Iterator[Executor]:
    assert watch._current is not None
    return (each.executor for each in watch._current.clocks)
