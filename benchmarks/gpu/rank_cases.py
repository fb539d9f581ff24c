"""What a rank of several does in the part `many`: cases of `gpu.ranks`, with JSON in and out."""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc.ir.communicators import Ends
from schedc.ir.program import Program
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.errors import PeerFailure
from schedc_runtime.parity.reference import ReferenceCheck
from support.expert_cases import compiled, model, train
from support.runtime_cases import next_token_loss


def parity(device: torch.device, rank: int, ranks: int, schedules: list[str], width: int) -> list[list[str]]:
    """By schedule: names of what differs on this rank from the same stages run serially."""
    torch.use_deterministic_algorithms(True)
    differing = []
    for schedule in schedules:
        program = schedc.compile(schedule, P=ranks, M=2 * ranks)
        blocks = _blocks(program, width, device)
        check = ReferenceCheck(blocks, program, functional.mse_loss, 0.1, False)
        pipe = Pipeline(blocks, program, loss_fn=functional.mse_loss, cut=Cut(blocks=""), timeout=60.0)
        batch, targets = _batch(program, width, 8, device)
        differing.append(check.check(pipe, pipe.step(batch, targets), batch, targets))
        pipe.close()
    return differing


def step_times(
    device: torch.device,
    rank: int,
    ranks: int,
    schedule: str,
    assignments: list[str],
    width: int,
    rows: int,
    repetitions: int,
) -> dict[str, Any]:
    """By assignment of communicators: median seconds of a step on this rank, and the loss of the last one."""
    program = schedc.compile(schedule, P=ranks, M=2 * ranks)
    times: dict[str, list[float]] = {name: [] for name in assignments}
    pipes, losses = {}, {}
    for name in assignments:
        numbers = Ends.of(program).assigned(name)
        assigned = replace(program, communicators=numbers)
        pipes[name] = Pipeline(
            _blocks(program, width, device), assigned, loss_fn=functional.mse_loss, cut=Cut(blocks=""), timeout=60.0,
            check_finite=False,
        )  # fmt: skip
    batch, targets = _batch(program, width, rows, device)
    for repetition in range(repetitions + 1):
        for name, pipe in pipes.items():
            pipe.zero_grad()
            start = _now(device)
            losses[name] = pipe.step(batch, targets)
            if repetition:
                times[name].append(_now(device) - start)
    for pipe in pipes.values():
        pipe.close()
    medians = {name: statistics.median(each) for name, each in times.items()}
    costs = _costs(_blocks(program, width, device)[0], batch[:rows], rank, repetitions)
    return {"seconds": medians, "losses": {name: loss.item() for name, loss in losses.items()}, "costs": costs}


def _costs(block: nn.Module, rows: Tensor, rank: int, repetitions: int) -> dict[str, float]:
    """Median milliseconds of a forward, of half a backward, and of a message from rank 0 to rank 1."""
    times: dict[str, list[float]] = {"F": [], "I": [], "W": [], "p2p": []}
    for repetition in range(repetitions + 1):
        start = _now(rows.device)
        output = block(rows.detach().requires_grad_())
        middle = _now(rows.device)
        output.sum().backward()
        ended = _now(rows.device)
        dist.barrier()
        sent = _now(rows.device)
        if rank < 2:
            (dist.recv if rank else dist.send)(output.detach(), 1 - rank)
        if repetition:
            half = (ended - middle) / 2
            for name, value in zip(times, (middle - start, half, half, _now(rows.device) - sent), strict=True):
                times[name].append(1e3 * value)
    return {name: statistics.median(each) for name, each in times.items()}


def expert_steps(
    device: torch.device, rank: int, ranks: int, plans: dict[str, str], steps: int, repetitions: int
) -> dict[str, Any]:
    """By plan: the losses of some steps with experts on one pipeline rank, and median seconds of a further one."""
    torch.use_deterministic_algorithms(True)
    results: dict[str, Any] = {}
    for name, lines in plans.items():
        text = f"  experts 8 top 2\n  topology nodes 1 x {ranks}\n{lines}"
        program = compiled("dualpipev", {"P": 1, "M": 2}, text)
        pipe = Pipeline(model().to(device), program, loss_fn=next_token_loss, timeout=60.0)
        losses = [float(loss) for loss in train(pipe, steps)]
        results[name] = {"losses": losses, "seconds": _steps(pipe, device, repetitions)}
        pipe.close()
    return results


def sharded_steps(device: torch.device, rank: int, ranks: int, width: int, repetitions: int) -> dict[str, Any]:
    """Losses of three steps with replicas whose parameters are whole, and sharded; median seconds of a step."""
    results: dict[str, Any] = {}
    for name, sharded in (("whole", False), ("sharded", True)):
        program = schedc.compile("1f1b", P=1, M=2)
        mesh = Mesh(1, 1, ranks, shard_dense=sharded)
        pipe = Pipeline(
            _blocks(program, width, device), program, loss_fn=functional.mse_loss, cut=Cut(blocks=""), mesh=mesh,
            timeout=60.0,
        )  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses, times = [], []
        batch, targets = _batch(program, width, 8, device, seed=rank)
        for _ in range(max(3, repetitions)):
            optimizer.zero_grad()
            start = _now(device)
            losses.append(float(pipe.step(batch, targets)))
            times.append(_now(device) - start)
            optimizer.step()
        results[name] = {"losses": losses, "seconds": statistics.median(times[1:])}
        pipe.close()
    return results


def killed(device: torch.device, rank: int, ranks: int, width: int) -> dict[str, Any]:
    """The last rank kills itself in the third forward of a step; what this rank raises, and behind which time."""
    program = schedc.compile("1f1b", P=ranks, M=2 * ranks)
    blocks = _blocks(program, width, device)
    pipe = Pipeline(blocks, program, loss_fn=functional.mse_loss, cut=Cut(blocks=""), timeout=30.0)
    batch, targets = _batch(program, width, 8, device)
    pipe.step(batch, targets)
    start = time.monotonic()
    if rank == ranks - 1:
        calls = iter(range(100))

        def kill(*_: Any) -> None:
            if next(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        blocks[-1].register_forward_hook(kill)
    try:
        pipe.step(batch, targets)
    except PeerFailure as failure:
        named = f"rank {ranks - 1} (pid " in str(failure) and "is dead: killed by SIGKILL" in str(failure)
        return {"named": named, "seconds": time.monotonic() - start, "text": str(failure)}
    return {"named": False, "seconds": time.monotonic() - start, "text": "no failure was raised"}


def _blocks(program: Program, width: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
              for _ in range(program.stages)]  # fmt: skip
    return nn.Sequential(*layers).to(device)


def _batch(program: Program, width: int, rows: int, device: torch.device, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, targets = torch.randn(2, rows * program.microbatches, width, generator=generator).to(device)
    return batch, targets


def _steps(pipe: Pipeline, device: torch.device, repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = _now(device)
        train(pipe, 1)
        times.append(_now(device) - start)
    return statistics.median(times)


def _now(device: torch.device) -> float:
    """Seconds, behind all that the device has been asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
