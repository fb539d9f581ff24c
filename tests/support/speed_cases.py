"""Ranks that are made slower on purpose while a pipeline trains, and what its watch says of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import process_time, process_time_ns
from typing import Any, NamedTuple
from unittest import mock

import torch

from schedc.compiler import compile as compile_schedule
from schedc.plan import Plan
from schedc_runtime import Mesh, Pipeline, watch_speed
from schedc_runtime.execute.executor import Executor
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.speed import clock, links, rule
from schedc_runtime.speed.links import BASELINE as LINK_BASELINE
from schedc_runtime.speed.links import WINDOW as LINK_WINDOW
from schedc_runtime.speed.ring import kept_steps
from schedc_runtime.speed.rule import BASELINE, WINDOW
from schedc_runtime.speed.watch import SpeedWatch
from schedc_runtime.transport.base import Transfer
from support.runtime_cases import model_for, tokens

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


def watched_loaders(rank: int, size: int, seconds: float, steps: int = 2 * WINDOW) -> dict[str, Any]:
    """The alarms of two quiet windows, and then while the batches of the last rank come so many seconds later.

    All ranks meet between the batch and the step. `period`: seconds of a quiet step, the time before it included.
    """
    program = compile_schedule("1f1b", P=size, M=size)
    batch, targets = tokens(size)
    pipe = Pipeline(model_for(program), program, loss_fn=next_token_loss, example=batch, timeout=60)
    lines: list[str] = []
    watch = watch_speed(pipe, lines.append)

    def alarms(count: int, late: float) -> list[Any]:
        before = len(watch.alarms)
        for _ in range(count):
            time.sleep(late if rank == size - 1 else 0.0)
            pipe.clip_grad_norm_(1.0)
            pipe.zero_grad()
            pipe.step(batch, targets)
        return [[alarm.rank, alarm.kind, alarm.factor, alarm.since] for alarm in watch.alarms[before:]]

    pipe.step(batch, targets)
    with short_baseline(20):
        alarms(rule.WARMING + 20, 0.0)
        began = time.perf_counter()
        quiet = alarms(2 * WINDOW, 0.0)
        period = (time.perf_counter() - began) / (2 * WINDOW)
        found = alarms(steps + WINDOW, seconds)
    pipe.close()
    return {"quiet": quiet, "period": period, "found": found, "lines": lines}


def watched_links(
    rank: int,
    size: int,
    slow: Sequence[Sequence[Any]],
    windows: int,
    folder: str,
    steps: int = 4 * LINK_WINDOW,
    baseline: int = LINK_BASELINE,
) -> dict[str, Any]:
    """The alarms of quiet windows, and those while the messages of one link after the other leave late.

    slow: [links] sender, receiver, and seconds by which its messages are later, for so many steps.
    """
    with mock.patch.multiple(links, BASELINE=baseline):
        return _linked(rank, size, slow, windows, folder, steps)


def _linked(
    rank: int, size: int, slow: Sequence[Sequence[Any]], windows: int, folder: str, steps: int
) -> dict[str, Any]:
    program = compile_schedule("dualpipev", P=size, M=2 * size)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, heads=2, blocks=2 * size, vocab=32))
    batch, targets = torch.randint(0, 32, (2 * size, 16)), torch.randint(0, 32, (2 * size, 16))
    pipe = Pipeline(model, program, loss_fn=next_token_loss, example=batch)
    lines: list[str] = []
    watch = watch_speed(pipe, lines.append, level=2, folder=folder)

    def alarms(count: int) -> list[Any]:
        before = len(watch.slow_links)
        for _ in range(count):
            pipe.step(batch, targets)
            pipe.zero_grad()
        return [list(link) for link in watch.slow_links[before:]]

    alarms(2 * LINK_WINDOW + LINK_WINDOW * links.BASELINE)
    quiet, found = alarms(windows * LINK_WINDOW), []
    for number, (sender, receiver, seconds) in enumerate(slow):
        quiet += alarms(2 * LINK_WINDOW + number % LINK_WINDOW)
        registers = stream_of(watch).clocks[0].executor.registers
        kept, wire = registers.transport, SlowWire(registers.transport, receiver, seconds)
        if sender == rank:
            registers.transport = wire
        during = alarms(steps)
        registers.transport = kept
        wire.close()
        found.append(during + alarms(LINK_WINDOW - number % LINK_WINDOW))
    watch.close()
    pipe.close()
    return {"quiet": quiet, "found": found, "lines": [line for line in lines if line.startswith("messages")]}


def watched_costs(rank: int, size: int, level: int, folder: str, rounds: int, steps: int) -> list[list[float]]:
    """[rounds] seconds of this process for steps without a watch, and with one; both take turns on one pipeline."""
    program = compile_schedule("dualpipev", P=size, M=2 * size)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=64, heads=2, blocks=2 * size, vocab=32))
    batch = torch.randint(0, 32, (2 * size, 32))
    pipe = Pipeline(model, program, loss_fn=next_token_loss, example=batch)
    watch = watch_speed(pipe, level=level, folder=folder)
    pipe.step(batch, batch)
    while stream_of(watch).rule is None:
        pipe.step(batch, batch)
    times = []
    for number in range(rounds):
        spent = [0.0, 0.0]
        for watched in (0, 1) if number % 2 else (1, 0):
            pipe._runner.watches = [watch] if watched else []
            begin = process_time()
            for _ in range(steps):
                pipe.step(batch, batch)
            spent[watched] = process_time() - begin
        times.append(spent)
    watch.close()
    pipe.close()
    return times


def watched_experts(rank: int, size: int, folder: str) -> dict[str, Any]:
    """The details of two steps of a MoE whose experts lie on all ranks; its loss collects garbage.

    loads: of a third step, which is traced and not watched.
    """
    from support.mesh_cases import balanced_moe

    mesh = Mesh(1, size, 1)
    batch, targets = tokens(4)

    def loss_fn(*given: Any) -> Any:
        gc.collect(1)
        return next_token_loss(*given)

    pipe = Pipeline(
        balanced_moe(), compile_schedule("zbh1", P=1, M=2), loss_fn=loss_fn, mesh=mesh, timeout=60,
        plan=Plan(overlap=True),
    )  # fmt: skip
    watch = watch_speed(pipe, level=2, folder=folder)
    for _ in range(2):
        pipe.step(batch, targets)
    watch.close()
    pipe.step(batch, targets, trace=True)
    loads = [list(load) for interval in pipe.intervals[0] for load in interval.loads]
    pipe.close()
    steps = kept_steps(Path(folder) / f"rank-{rank:04}.times")
    return {"steps": [step.step for step in steps], "notes": [step.note for step in steps], "loads": loads}


class _Leaving(NamedTuple):
    """A message that leaves late. leaving: gives the handle of its post."""

    tensors: tuple[torch.Tensor, ...]
    leaving: Future[Any]


class SlowWire:
    """The transport of a rank whose messages to one peer leave later, each behind the one before it.

    seconds: how much later than they are posted. Waits, receives and other peers are as before.
    """

    cooperative = False

    def __init__(self, inner: Any, peer: int, seconds: float) -> None:
        self._inner, self._peer, self._seconds = inner, peer, seconds
        self.rank = inner.rank
        self._wire = ThreadPoolExecutor(1)

    def post(self, batch: Sequence[Transfer]) -> list[Any]:
        late = {place for place, each in enumerate(batch) if each.peer == self._peer and not each.receive}
        soon = iter(self._inner.post([each for place, each in enumerate(batch) if place not in late]))
        begin = time.monotonic()
        return [
            _Leaving(each.tensors, self._wire.submit(self._leave, each, begin)) if place in late else next(soon)
            for place, each in enumerate(batch)
        ]

    def _leave(self, transfer: Transfer, begin: float) -> Any:
        time.sleep(max(0.0, begin + self._seconds - time.monotonic()))
        return self._inner.post([transfer])[0]

    def ready(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> None:
        self._inner.wait(handle.leaving.result() if isinstance(handle, _Leaving) else handle)

    def close(self) -> None:
        self._wire.shutdown()


@contextmanager
def short_baseline(steps: int) -> Iterator[None]:
    """Baselines of so few steps are taken as they are."""
    with mock.patch.multiple(clock, BASELINE=steps), mock.patch.multiple(rule, SETTLED=100.0):
        yield


def stream_of(watch: SpeedWatch) -> Any:
    """The stream of the last step."""
    assert watch._current is not None
    return watch._current
