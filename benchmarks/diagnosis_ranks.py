"""Gloo ranks that train layers of known length and trace their steps, each with its fault or none: a rank's side.

Layers sleep: their wall time is what a table says, whatever else the machine does. Messages are real. A slow link holds
a message back until its delay after the send has passed, by times of sends that ranks share.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile, record_function

import schedc
from schedc_runtime import Mesh, Pipeline, save_trace
from schedc_runtime.offload.snapshot import StageSnapshot
from schedc_runtime.testing import RankPool
from schedc_runtime.transport.distributed import TorchTransport

MOST_RANKS, ROWS, WIDTH = 4, 2, 8
MESSAGES = 4096
"""Messages of a channel whose times are kept."""
SENT = "sent"
"""The file with the time of each message of each channel."""


@dataclass(frozen=True)
class Setting:
    """What runs. how: torch, or ours. seconds: forward, and each half of a backward, of a rank's share of the model."""

    how: str
    schedule: str
    ranks: int = 4
    microbatches: int = 8
    seconds: float = 0.05


@dataclass(frozen=True)
class Fault:
    """What is slow. rank: -1 none; kind: F, I, W, B for I and W, or "" for all; factor of its time. link: ordered pair.

    delay: seconds that a message of the link takes. data: factors of microbatches; empty: all 1.
    saving: seconds that each piece of a snapshot takes; 0: no snapshot.
    """

    rank: int = -1
    kind: str = ""
    factor: float = 1.5
    link: tuple[int, int] = (-1, -1)
    delay: float = 0.0
    data: tuple[float, ...] = ()
    saving: float = 0.0


class _Sleeps(torch.autograd.Function):
    """The same tensor, with a sleep in its backward, and one in the forward of the input.

    kind: ``I`` for the layer's input, ``W`` for its weight, so that each half of a backward has a node of its own.
    x: [rows, features] the input; the first feature of a row is its work.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layer: SleepingLayer, kind: str, x: Tensor) -> Tensor:  # type: ignore[override]
        # torch tries shapes with values that nobody has set: a NaN gives 0.
        ctx.layer, ctx.kind, ctx.work = layer, kind, min(max(0.0, float(x[0, 0])), 10.0)
        if kind == "I":
            time.sleep(layer.seconds("F") * ctx.work)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.layer.seconds(ctx.kind) * ctx.work)
        return gradient, None, None, None


class SleepingLayer(nn.Module):
    """A layer that adds, then sleeps. length: seconds of a forward, and of each half of a backward.

    Its bias makes the first stage compute the gradient of a layer's input, as stages of many layers do.
    """

    fault = Fault()
    rank = -1

    def __init__(self, length: float) -> None:
        super().__init__()
        self.weight, self.bias, self.length = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH)), length

    def seconds(self, kind: str) -> float:
        kinds = {"": "FIW", "B": "IW"}.get(self.fault.kind, self.fault.kind)
        slow = self.rank == self.fault.rank and kind in kinds
        return self.length * (self.fault.factor if slow else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        work = x.detach()
        inside = _Sleeps.apply(x + self.bias, self, "I", work)  # type: ignore[no-untyped-call]
        return inside * _Sleeps.apply(self.weight, self, "W", work)  # type: ignore[no-untyped-call,no-any-return]


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).pow(2).mean()


def batch(fault: Fault, microbatches: int) -> Tensor:
    """[rows, WIDTH] ones, but the work of each microbatch as first feature."""
    x = torch.ones(microbatches * ROWS, WIDTH)
    x[:, 0] = torch.tensor(fault.data or (1.0,) * microbatches).repeat_interleave(ROWS)
    return x


def run_ranks(setting: Setting, faults: list[Fault], folder: Path) -> None:
    """Traces a step under each fault. torch: a file for each rank; ours: one for each rank and step."""
    workers = RankPool(setting.ranks)
    given = {"setting": asdict(setting), "faults": [asdict(fault) for fault in faults], "folder": str(folder)}
    try:
        workers.run("diagnosis_ranks:traced_rank", timeout=600.0, **given)
    finally:
        workers.close()
        (folder / SENT).unlink(missing_ok=True)


def traced_rank(rank: int, size: int, setting: dict[str, Any], faults: list[dict[str, Any]], folder: str) -> None:
    """A worker's part of `run_ranks`, whose arguments come as JSON."""
    torch.set_num_threads(1)
    SleepingLayer.rank = rank
    given = [Fault(**{**each, "link": tuple(each["link"]), "data": tuple(each["data"])}) for each in faults]
    target = _torch_rank if setting["how"] == "torch" else _own_rank
    target(rank, Setting(**setting), given, Path(folder))


def _torch_rank(rank: int, setting: Setting, faults: list[Fault], folder: Path) -> None:
    ranks = setting.ranks
    kinds = {
        "1F1B": (schedules.Schedule1F1B, [rank]),
        "GPipe": (schedules.ScheduleGPipe, [rank]),
        "Interleaved1F1B": (schedules.ScheduleInterleaved1F1B, [rank, rank + ranks]),
        "ZBV": (schedules.ScheduleZBVZeroBubble, [rank, 2 * ranks - 1 - rank]),
    }
    kind, held = kinds[setting.schedule]
    total = ranks * len(held)
    layers = [SleepingLayer(setting.seconds / len(held)) for _ in held]
    stages = [
        PipelineStage(layer, stage, total, torch.device("cpu")) for layer, stage in zip(layers, held, strict=True)
    ]
    if setting.schedule == "1F1B":
        _name_chunks(stages[0])
    schedule = kind(stages[0] if len(held) == 1 else stages, setting.microbatches, loss_fn=square)  # type: ignore[arg-type,operator]

    def step(fault: Fault) -> None:
        SleepingLayer.fault = fault
        x = batch(fault, setting.microbatches)
        dist.barrier()
        schedule.step(*([x] if 0 in held else []), target=x if total - 1 in held else None)

    step(Fault())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for fault in faults:
            step(fault)
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))


def _name_chunks(stage: Any) -> None:
    """Names the chunks of a single-stage schedule, whose 1F1B names none (docs/guide/diagnosis.md)."""
    for method, name in (("forward_one_chunk", "Forward"), ("backward_one_chunk", "Backward")):
        setattr(stage, method, _named(getattr(stage, method), name))


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def chunk(i: int, *args: Any, **more: Any) -> Any:
        with record_function(f"{name} {i}"):
            return run(i, *args, **more)

    return chunk


def _own_rank(rank: int, setting: Setting, faults: list[Fault], folder: Path) -> None:
    program = schedc.compile(setting.schedule, P=setting.ranks, M=setting.microbatches)
    length = setting.seconds * setting.ranks / program.stages
    model = nn.Sequential(*(SleepingLayer(length) for _ in range(program.stages)))
    _hold_back(folder)
    _sleeping_copies()
    pipe = Pipeline(model, program, loss_fn=square, mesh=Mesh(pipeline=setting.ranks))
    for step, fault in enumerate([Fault(), *faults]):
        SleepingLayer.fault = fault
        x = batch(fault, setting.microbatches)
        dist.barrier()
        pipe.step(x, x, trace=step > 0, snapshot=fault.saving > 0)
        if step:
            save_trace(pipe, folder)
    pipe.close()


def _sleeping_copies() -> None:
    """Lets each piece of a snapshot take as long as the fault says."""
    start = StageSnapshot.start

    def slow(self: StageSnapshot) -> int:
        time.sleep(SleepingLayer.fault.saving)
        return start(self)

    StageSnapshot.start = slow  # type: ignore[method-assign]


def _hold_back(folder: Path) -> None:
    """Lets waits on the slow link end no sooner than the delay after the send, whose time is in a file of all ranks."""
    path = folder / SENT
    path.touch()
    with path.open("r+b") as file:
        file.truncate(8 * MOST_RANKS * MOST_RANKS * MESSAGES)
    sent = np.memmap(path, np.float64)
    post, wait = TorchTransport.post, TorchTransport.wait
    counts: dict[tuple[int, int], int] = defaultdict(int)
    due: dict[int, int] = {}

    def timed_post(self: Any, transfers: Any) -> Any:
        handles = post(self, transfers)
        for transfer, handle in zip(transfers, handles, strict=True):
            way = (transfer.peer, self.rank) if transfer.receive else (self.rank, transfer.peer)
            place = (way[0] * MOST_RANKS + way[1]) * MESSAGES + counts[way] % MESSAGES
            counts[way] += 1
            if not transfer.receive:
                sent[place] = time.monotonic()
            elif way == SleepingLayer.fault.link:
                due[id(handle)] = place
        return handles

    def late_wait(self: Any, handle: Any) -> None:
        wait(self, handle)
        if (found := due.pop(id(handle), None)) is not None:
            time.sleep(max(0.0, float(sent[found]) + SleepingLayer.fault.delay - time.monotonic()))

    TorchTransport.post, TorchTransport.wait = timed_post, late_wait  # type: ignore[method-assign]
