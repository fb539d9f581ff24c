"""What ranks of a restarted job do in one attempt: train and finish, or fail in the way that the attempt is given."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline, join
from schedc_runtime.errors import PeerFailure

kept: Pipeline | None = None


def trainer(attempt: int, rank: int, fault: str = "", own: bool = False, steps: int = 3) -> list[float]:
    """Join the others and train two ranks; the losses. fault: the fault of rank 1 in this attempt."""
    torch.set_num_threads(1)
    if fault == "before joining" and rank == 1:
        os._exit(1)
    if own:
        dist.init_process_group("gloo")
    else:
        join(timeout=2 if fault == "before joining" else 60)
    if fault == "before building" and rank == 1:
        os._exit(1)
    pipe = pipeline(rank, fault, timeout=2 if fault == "before building" else 30)
    losses = [float(pipe.step(*batch())) for _ in range(steps)]
    pipe.close()
    dist.destroy_process_group()
    return losses


def warm() -> None:
    """A step of both ranks in one process."""
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)])
    program = compile_schedule("1f1b", P=2, M=2)
    pipe = Pipeline(model, program, loss_fn=nn.functional.mse_loss, in_process=True)
    pipe.step(*batch())
    pipe.close()


def pipeline(rank: int, fault: str, timeout: float, group: dist.ProcessGroup | None = None) -> Pipeline:
    """Two ranks of 1F1B; at the second step rank 1 fails."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)])
    calls = iter(range(1_000))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if rank == 1 and type(output.data) is Tensor and next(calls) == 3:
            FAULTS[fault]()
        return nn.functional.mse_loss(output, target)

    program = compile_schedule("1f1b", P=2, M=2)
    return Pipeline(model, program, loss_fn=loss_fn, timeout=timeout, group=group)


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 4), torch.zeros(4, 4)


def _raise() -> None:
    raise ZeroDivisionError("injected")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Any] = {"raise": _raise, "kill": _kill}
FAULTS |= dict.fromkeys(["", "before joining", "before building"], lambda: None)


def several(attempt: int, rank: int) -> list[list[float]]:
    """Three ranks that made the default group themselves; ranks 1 and 2 train one pipeline after another on a group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    losses = []
    if rank:
        for _ in range(2):
            pipe = pipeline(rank, "", timeout=30, group=group)
            losses.append([float(pipe.step(*batch())) for _ in range(2)])
            pipe.close()
    dist.barrier()
    return losses


def one_list(attempt: int, rank: int) -> list[str]:
    """Rank 1 of four is killed in the second step; what this rank raises."""
    torch.set_num_threads(1)
    join()
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    program = compile_schedule("1f1b", P=4, M=4)
    pipe = Pipeline(model, program, loss_fn=nn.functional.mse_loss, timeout=20)
    pipe.step(*batch())
    if rank == 1:
        pipe.partition.modules[1].register_forward_hook(lambda *_: _kill())
    try:
        pipe.step(*batch())
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def broken(attempt: int, rank: int) -> list[str]:
    """All connections of rank 1 to others break, though nobody died; what this rank raises."""
    torch.set_num_threads(1)
    join()
    pipe = pipeline(rank, "", timeout=20)
    pipe.step(*batch())
    if rank == 1:
        pipe.partition.modules[1].register_forward_hook(lambda *_: _break_connections())
    try:
        pipe.step(*batch())
    except PeerFailure as error:
        return [type(error).__name__, error.rank, str(error)]
    return []


def leaving(attempt: int, rank: int) -> None:
    """Train and leave as a script that ends, with pipeline and group open."""
    global kept
    torch.set_num_threads(1)
    join()
    kept = pipeline(rank, "", timeout=20)
    kept.step(*batch())
    raise SystemExit


def _break_connections() -> None:
    """Shut down every connection but those with the store."""
    store = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.getpeername()[1] != store:
                connection.shutdown(socket.SHUT_RDWR)


def store_lost(attempt: int, rank: int) -> list[str]:
    """Rank 0, which holds the store, is killed in a step; what rank 1 raises."""
    torch.set_num_threads(1)
    join()
    pipe = pipeline(rank, "", timeout=20)
    pipe.step(*batch())
    if rank == 0:
        pipe.partition.modules[0].register_forward_hook(lambda *_: _kill())
    start = time.monotonic()
    try:
        pipe.step(*batch())
    except Exception as error:
        return [type(error).__name__, str(error), f"{time.monotonic() - start:.1f}"]
    return []
