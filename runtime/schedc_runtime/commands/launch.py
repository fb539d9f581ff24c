"""Starts one local process per rank, as torchrun would, and ends them all when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from schedc.interrupts import unheard
from schedc_runtime.ranks.processes import is_stopped, signal_name

_GRACE = 10.0
"""Seconds in which the other ranks may report their errors after one has failed, before they are ended."""


_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit statuses after these signals, as shells give them."""


def launched() -> bool:
    """Whether this process is one of several that a launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m module arguments`` on ``ranks`` local processes: 0 if all of them succeed, else 1; 130 on Ctrl-C.

    A rank that was ended by a signal cannot report it: stderr names it.
    The processes meet at a store of this process, on a port that the system chooses. This process takes Ctrl-C and
    SIGTERM, and ends the others.
    """
    signal.signal(signal.SIGTERM, _terminated)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # A rank looks for a failed peer every half second: torch would log each look that found nothing.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }  # fmt: skip
    command = [sys.executable, "-m", module, *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with unheard():
            for rank in range(ranks):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own))
        _wait(processes)
        for rank, process in enumerate(processes):
            if process.returncode is not None and process.returncode < 0:
                how = f"rank {rank} (pid {process.pid}) was ended by {signal_name(-process.returncode)}"
                print(f"error: {how}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return int(any(process.returncode for process in processes))


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(_TERMINATED)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended, but at most `_GRACE` seconds after the first failure, and not for stopped ones."""
    deadline = float("inf")
    while (alive := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        if len(alive) < len(processes) and any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE)
            if all(is_stopped(process.pid) for process in alive):
                return
        time.sleep(0.05)
