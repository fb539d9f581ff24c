"""Joins the processes of a launcher: their process group, and a part of the store for one attempt alone.

torch's elastic agent keeps one store for all attempts of a job, with all keys of earlier attempts. Its restart count
does not tell attempts apart: a restart for a new node is not counted, and each node counts its own failures. Ranks
therefore agree on a new name each time they meet, and keep all keys under this name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from schedc_runtime.device.choice import gpu
from schedc_runtime.device.limits import check_seconds
from schedc_runtime.errors import PeerFailure, RuntimeFault, StepTimeout

_FIRST_LOOK, _LAST_LOOK = 0.001, 0.1
"""Seconds between two looks into the store: at first, and after a long wait."""


def join(backend: str | None = None, *, timeout: float = 300.0) -> torch.device:
    """Join the processes that torchrun or another launcher started. Returns the device for this process's model.

    Makes torch's default process group, as ``init_process_group`` does. Its keys in the store belong to this attempt
    alone: a restarted job does not read the keys of an earlier attempt.

    backend: default is NCCL if each process of the machine has its own GPU, else gloo.
    timeout: seconds to wait for the other processes.

    From here on, the report with which torchrun ends has the text of an uncaught error, with its help.

    Without a launcher this joins nothing. Raises `StepTimeout` with the names of missing ranks.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return torch.device("cpu")
    if dist.is_initialized():
        raise RuntimeFault(
            "torch.distributed has been initialised before", "call join() instead of init_process_group, and once"
        )
    check_seconds("timeout", timeout)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        end_with_cause(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = None if backend == "gloo" else gpu.own_device(local, processes)
    limit = timedelta(seconds=timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    names = [f"rank {process}" for process in range(size)]
    store = meet_ranks(store, "join", rank, names, timeout)
    dist.init_process_group(
        backend or (gpu.BACKEND if device else "gloo"), store=store, rank=rank, world_size=size, device_id=device
    )
    return device or torch.device("cpu")


def end_with_cause(path: Path) -> None:
    """Writes an uncaught error into torchrun's file for it: the text that its report of the first failure shows."""
    shown = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        shown(kind, error, trace)
        text, now = f"{kind.__name__}: {error}", str(int(time.time()))
        said = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": now}}
        if not path.exists():  # a script under torch's `record` has written its calls
            path.write_text(json.dumps({"message": said}), encoding="utf-8")

    sys.excepthook = hook


def meet_ranks(store: Any, what: str, process: int, names: Sequence[str], timeout: float) -> Any:
    """The part of ``store`` for this meeting of all ``names`` alone: ``schedc/<run>/<what>/<attempt>``.

    store: a torch Store, which may hold keys of earlier attempts. what: the occasion, the same on all ranks.
    process: this rank's number among ``names``. timeout: seconds to wait for the others.

    Every process in ``names`` must call it. A second call begins a new meeting.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID") or "run"
    table = PrefixStore(f"schedc/{run}/{what}", store)
    try:
        return PrefixStore(_agree(table, process, names, timeout), table)
    except dist.DistNetworkError as error:
        raise PeerFailure(
            names[0],
            f"{names[process]} lost the store that all ranks meet at: {error}\n"
            f"its process has ended; without torchrun that is the process of {names[0]}",
        ) from None


def _agree(table: Any, process: int, names: Sequence[str], timeout: float) -> str:
    """A name that all ranks of this meeting share and that no earlier meeting had.

    Process 0 proposes a name. The other ranks answer each proposal that they see with a random number. A proposal holds
    when process 0 has confirmed these numbers. A rank that answers an old proposal finds no confirmation.
    """
    deadline = time.monotonic() + timeout
    mine = token_hex(8)
    if process == 0:
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{mine}"
        table.set("proposal", attempt)
        answers = [f"{attempt}/answer/{other}" for other in range(1, len(names))]
        for look in _looks(deadline):
            if not answers or table.check(answers):
                break
            if not look:
                late = [name for name, key in zip(names[1:], answers, strict=True) if not table.check([key])]
                raise StepTimeout(f"{', '.join(late)} did not join {names[0]} within {timeout:g} s")
        table.set(f"{attempt}/confirmed", " ".join([mine, *(table.get(key).decode() for key in answers)]))
        for key in answers:
            table.delete_key(key)
        return attempt
    answered: dict[str, None] = {}
    for look in _looks(deadline):
        if table.check(["proposal"]) and (proposal := table.get("proposal").decode()) not in answered:
            table.set(f"{proposal}/answer/{process}", mine)
            answered[proposal] = None
        for attempt in answered:
            if table.check([key := f"{attempt}/confirmed"]) and mine in table.get(key).decode().split():
                return attempt
        if not look:
            break
    raise StepTimeout(
        f"{names[process]} waited {timeout:g} s for {names[0]} to join",
        "all ranks must start, and build the same pipelines in the same order",
    )


def _looks(deadline: float) -> Iterator[bool]:
    """Yields True after longer and longer pauses until the deadline, then False once."""
    pause = _FIRST_LOOK
    while time.monotonic() < deadline:
        yield True
        time.sleep(pause)
        pause = min(_LAST_LOOK, pause * 1.5)
    yield False
