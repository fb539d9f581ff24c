"""Starts one local process per rank, as torchrun would, and ends them all when one fails.

The ranks are forked from the process that launches them: it has loaded torch, and runs nothing of it before.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from schedc.interrupts import end_with, ended_by_signals, unheard
from schedc_runtime.ranks.agent import AGENT, SPARE
from schedc_runtime.ranks.processes import is_stopped, signal_name

_GRACE = 10.0
"""Seconds in which the other ranks may report their errors after one has failed, before they are ended."""


_INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells give it."""


def launched() -> bool:
    """Whether a launcher has started this process among several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(module: str, arguments: Sequence[str], ranks: int, restarts: int = 0) -> int:
    """Run ``main(arguments)`` of a module on ``ranks`` processes: 0 if all of them succeed, else 1; 130 on Ctrl-C.

    restarts: how often this process forks all ranks again when one has failed.

    This process takes Ctrl-C, SIGTERM and SIGHUP, and ends the others. The last two end it with 128 + the signal. When
    this process is killed, the kernel kills the others.

    A rank that was ended by a signal cannot report it: stderr names it.
    The processes meet at a store of this process, on a port that the system chooses.
    """
    me = str(os.getpid())
    with ended_by_signals():
        for attempt in range(restarts + 1):
            agent = {"TORCHELASTIC_RESTART_COUNT": str(attempt), AGENT: me, SPARE: me} if restarts else {}
            status = _launch(module, arguments, ranks, agent)
            if status in (0, _INTERRUPTED) or attempt == restarts:
                break
            print(f"schedc: restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
    return status


def _launch(module: str, arguments: Sequence[str], ranks: int, agent: Mapping[str, str]) -> int:
    import_module("torch._dynamo")  # fake tensors and optimizers load it, on every rank if not here
    shared = {
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", **agent,
    }  # fmt: skip
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    channels: list[Connection] = []
    try:
        gc.freeze()  # the ranks share the memory of what is loaded, until a collection writes to it
        with unheard():
            for rank in range(ranks):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                theirs, ours = context.Pipe(duplex=False)
                started = context.Process(target=_run, args=(module, arguments, own, theirs, os.getpid()))
                started.start()
                theirs.close()
                processes.append(started)
                channels.append(ours)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its threads do not outlive a fork
        for channel in channels:
            channel.send(store.port)
        _wait(processes)
        for rank, process in enumerate(processes):
            if process.exitcode is not None and process.exitcode < 0:
                how = f"rank {rank} (pid {process.pid}) was ended by {signal_name(-process.exitcode)}"
                print(f"error: {how}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        alive = multiprocessing.active_children()  # one may not be in the list yet
        for process in alive:
            process.kill()
        for process in alive:
            process.join()
    return int(any(process.exitcode for process in processes))


def _run(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], channel: Connection, launcher: int
) -> None:
    """A rank: ``main`` of the module in this environment. The channel gives the port of the store."""
    end_with(launcher)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment, MASTER_PORT=str(channel.recv()))
    torch.set_num_threads(1)  # as torchrun does
    sys.exit(import_module(module).main(arguments))


def _wait(processes: list[BaseProcess]) -> None:
    """Wait until all have ended, but at most `_GRACE` seconds after the first failure, and not for stopped ones."""
    deadline = float("inf")
    while (alive := [process for process in processes if process.is_alive()]) and time.monotonic() < deadline:
        if len(alive) < len(processes) and any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE)
            if all(is_stopped(process.pid) for process in alive if process.pid is not None):
                return
        time.sleep(0.05)
