"""Real ranks for tests: worker processes that start once and then run many cases over gloo.

A case is an importable function ``f(rank, world_size, **arguments)``, named ``module:function``. Arguments and result
are JSON. Starting four processes takes seconds, and a case milliseconds.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_START_TIMEOUT = 120.0


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
    """``world_size`` worker processes joined by gloo. After a case that kills or hangs a worker they start anew."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[subprocess.Popen[bytes]] = []
        self._requests: list[IO[bytes]] = []
        self._answers: list[IO[bytes]] = []
        self._store: TCPStore | None = None

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
        request = json.dumps({"case": case, "arguments": arguments}).encode() + b"\n"
        for pipe in self._requests:
            pipe.write(request)
            pipe.flush()
        outcomes = self._collect(timeout)
        if any(isinstance(o, RankError) and o.kind in ("died", "timeout") for o in outcomes):
            self.close()
        return outcomes

    def _collect(self, timeout: float) -> list[Any]:
        outcomes: list[Any] = [RankError(r, "timeout", f"no answer in {timeout} s") for r in range(self.world_size)]
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._answers):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fileobj)
                    outcomes[key.data] = self._answer(key.data)
        return outcomes

    def _answer(self, rank: int) -> Any:
        if not (line := self._answers[rank].readline()):
            status = self._workers[rank].wait()
            return RankError(rank, "died", f"the process ended with status {status}")
        answer = json.loads(line)
        return answer["result"] if "result" in answer else RankError(rank, *answer["error"])

    def _ensure_started(self) -> None:
        if self._workers:
            return
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(self.world_size):
            request_in, request_out = os.pipe()
            answer_in, answer_out = os.pipe()
            command = [sys.executable, "-m", "schedc_runtime.testing"]
            sizes = [rank, self.world_size, self._store.port, request_in, answer_out]
            self._workers.append(
                subprocess.Popen(
                    command + [str(x) for x in sizes],
                    pass_fds=(request_in, answer_out),
                    env=environment,
                    start_new_session=True,
                )
            )
            os.close(request_in)
            os.close(answer_out)
            self._requests.append(os.fdopen(request_out, "wb"))
            self._answers.append(os.fdopen(answer_in, "rb", buffering=0))
        if errors := [o for o in self._collect(_START_TIMEOUT) if isinstance(o, RankError)]:
            self.close()
            raise CaseFailed("starting the workers", errors)

    def close(self) -> None:
        """Kill the workers and wait for their ends."""
        for pipe in (*self._requests, *self._answers):
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # a worker that died cannot take what was buffered for it
        for worker in self._workers:
            if worker.poll() is None:
                os.kill(worker.pid, signal.SIGKILL)
            worker.wait()
        self._workers, self._requests, self._answers, self._store = [], [], [], None


@cache
def pool(world_size: int) -> RankPool:
    """The pool of this size that all tests of the process share. It closes when the process ends."""
    shared = RankPool(world_size)
    atexit.register(shared.close)
    return shared


def _serve(rank: int, world_size: int, port: int, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Run a worker: join the others, then answer requests until the pipe closes."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_START_TIMEOUT)
    )
    _send(answers, {"result": "started"})
    for line in requests:
        request = json.loads(line)
        try:
            module, function = request["case"].split(":")
            result = getattr(import_module(module), function)(rank, world_size, **request["arguments"])
            answer = {"result": result}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error), traceback.format_exc()]}
        _send(answers, answer)


def _send(pipe: IO[bytes], answer: dict[str, Any]) -> None:
    pipe.write(json.dumps(answer).encode() + b"\n")
    pipe.flush()


if __name__ == "__main__":
    _rank, _world_size, _port, _requests, _answers = map(int, sys.argv[1:])
    _serve(_rank, _world_size, _port, os.fdopen(_requests, "rb"), os.fdopen(_answers, "wb"))
    os._exit(0)  # destroying the groups would wait for dead ranks
