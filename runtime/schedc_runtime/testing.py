"""Real ranks for tests: worker processes that start once and then run many cases over gloo.

With it come a simulated device, and the check of what a graph of a step cannot hold.

A case is an importable function ``f(rank, world_size, **arguments)``, named ``module:function``. Arguments and result
are JSON. Workers are forked from a server process that has loaded torch once: starting them anew takes milliseconds.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from schedc.interrupts import end_with
from schedc_runtime.capture.check import CaptureReport, capturable
from schedc_runtime.device.simulated import simulated_device

__all__ = [
    "PRELOADED",
    "CaptureReport",
    "CaseFailed",
    "RankError",
    "RankPool",
    "capturable",
    "pool",
    "simulated_device",
]

_START_TIMEOUT = 120.0

TESTS = "SCHEDC_POOL_OF"
"""The variable with the process id of what runs the tests."""

PRELOADED = [
    "schedc_runtime.pool_server",
    "schedc_runtime.pipeline.pipeline",
    "schedc_runtime.trainers.checkpoints",
    "schedc_runtime.parity.reference",
    "schedc_runtime.models.gpt",
    "torch._dynamo",
    "schedc.compiler",
    "schedc.syntax.grammar_tables",
]
"""Modules that the server loads for all workers, which would each take half a second. Fake tensors load dynamo."""


@dataclass(frozen=True)
class RankError:
    """A case raised on one rank. kind: the exception's class name; message: its text; trace: its traceback."""

    rank: int
    kind: str
    message: str
    trace: str = field(repr=False, default="")


class CaseFailed(AssertionError):
    """At least one rank failed, died or did not answer in time."""

    def __init__(self, case: str, errors: Sequence[RankError]) -> None:
        self.errors = tuple(errors)
        details = "\n".join(f"--- rank {e.rank}: {e.kind}: {e.message}\n{e.trace}" for e in errors)
        super().__init__(f"{case} failed on rank {', '.join(str(e.rank) for e in errors)}\n{details}")


class RankPool:
    """``world_size`` worker processes joined by gloo. After a case that kills or hangs a worker they start anew.

    Between cases the workers are stopped: each group of a worker has a thread of gloo that wakes 100 times a second.
    They end with the process in any case. The kernel kills the server that forked them, and then the workers.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[BaseProcess] = []
        self._channels: list[Connection] = []
        self._store: TCPStore | None = None
        atexit.register(self.close)

    def run(self, case: str, *, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """[world_size] results of all ranks. Raises `CaseFailed` if a rank returns none within ``timeout`` seconds."""
        outcomes = self.outcomes(case, timeout=timeout, **arguments)
        if errors := [o for o in outcomes if isinstance(o, RankError)]:
            raise CaseFailed(case, errors)
        return outcomes

    def outcomes(self, case: str, *, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """As `run`, with a `RankError` in place of a missing result, for cases that are meant to fail.

        timeout: seconds for all ranks to answer.
        """
        self._ensure_started()
        self._signal(signal.SIGCONT)
        request = json.dumps({"case": case, "arguments": arguments}).encode()
        for channel in self._channels:
            channel.send_bytes(request)
        outcomes = self._collect(timeout)
        if any(isinstance(o, RankError) and o.kind in ("died", "timeout") for o in outcomes):
            self.close()
        self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            assert worker.pid is not None
            with suppress(ProcessLookupError):  # it ended between cases, as the next case will say
                os.kill(worker.pid, number)

    def _collect(self, timeout: float) -> list[Any]:
        outcomes: list[Any] = [RankError(r, "timeout", f"no answer in {timeout} s") for r in range(self.world_size)]
        deadline = time.monotonic() + timeout
        waiting = {channel: rank for rank, channel in enumerate(self._channels)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for channel in wait(list(waiting), left):
                assert isinstance(channel, Connection)
                rank = waiting.pop(channel)
                outcomes[rank] = self._answer(rank)
        return outcomes

    def _answer(self, rank: int) -> Any:
        try:
            answer = json.loads(self._channels[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._workers[rank].join()
            return RankError(rank, "died", f"the process ended with status {self._workers[rank].exitcode}")
        return answer["result"] if "result" in answer else RankError(rank, *answer["error"])

    def _ensure_started(self) -> None:
        if self._workers:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        os.environ[TESTS] = str(os.getpid())
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, self.world_size, self._store.port, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._channels.append(ours)
        if errors := [o for o in self._collect(_START_TIMEOUT) if isinstance(o, RankError)]:
            self.close()
            raise CaseFailed("starting the workers", errors)

    def close(self) -> None:
        """Kill the workers and wait for their ends."""
        for channel in self._channels:
            channel.close()
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._channels, self._store = [], [], None


@cache
def pool(world_size: int) -> RankPool:
    """The pool of this size that all tests of the process share."""
    return RankPool(world_size)


def _serve(rank: int, world_size: int, port: int, channel: Connection) -> None:
    """Run a worker: join the others, then answer requests until the channel closes."""
    gc.freeze()  # the modules that the server has loaded stay
    gc.set_threshold(10_000, 20, 20)
    end_with(os.getppid())  # the server, which ends with the process that runs the tests
    os.setsid()  # Ctrl-C is for the process that runs the tests, which then closes the pool
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_START_TIMEOUT)
    )
    _send(channel, {"result": "started"})
    while (request := _next_request(channel)) is not None:
        try:
            module, function = request["case"].split(":")
            result = getattr(import_module(module), function)(rank, world_size, **request["arguments"])
            answer = {"result": result}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error), traceback.format_exc()]}
        _send(channel, answer)
    os._exit(0)  # destroying the groups would wait for dead ranks


def _next_request(channel: Connection) -> dict[str, Any] | None:
    """The next request; None once the channel is closed."""
    try:
        request: dict[str, Any] = json.loads(channel.recv_bytes())
    except EOFError:
        return None
    return request


def _send(channel: Connection, answer: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(answer).encode())
