"""Runs a case on a process per GPU, or on two processes over gloo, and gives what each rank returned.

    python -m gpu.ranks CASE ARGUMENTS      one rank, whose place a launcher's variables tell

A case is a function of `gpu.rank_cases`: `case(device, rank, ranks, **arguments)`. Arguments and results are JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gpu.setting import NotMeasured, Setting

LIMIT = 120.0
"""Seconds for all ranks of a case."""
TWIN = 2
"""Processes of the simulated twin."""


class Outcome(NamedTuple):
    """How a rank's process ended. result: None without one. ``told``: its last lines."""

    status: int | None
    result: Any
    told: str


def ranks_of(setting: Setting, least: int = 2) -> int:
    """How many ranks a case has here. Raises `NotMeasured` with fewer than ``least`` GPUs."""
    count = torch.cuda.device_count() if setting.gpu else TWIN
    if count < least:
        raise NotMeasured(f"{count} GPU, and {least} are needed; SCHEDC_GPU=simulated runs the twin over gloo")
    return count


def on_ranks(setting: Setting, case: str, ranks: int, limit: float = LIMIT, **arguments: Any) -> list[Outcome]:
    """[ranks] the outcomes of a case. A process that is still there behind ``limit`` seconds is killed."""
    with TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        processes = [_start(setting, case, rank, ranks, port, Path(folder), arguments) for rank in range(ranks)]
        deadline = time.monotonic() + limit
        outcomes = []
        for rank, process in enumerate(processes):
            try:
                status: int | None = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = None
            result, told = Path(folder, f"{rank}.json"), Path(folder, f"{rank}.txt").read_text(errors="replace")
            value = json.loads(result.read_text()) if result.exists() else None
            outcomes.append(Outcome(status, value, "\n".join(told.splitlines()[-12:])))
    return outcomes


def results(outcomes: Sequence[Outcome]) -> list[Any]:
    """[ranks] what the ranks returned. Raises RuntimeError with the errors of the first that failed."""
    for rank, outcome in enumerate(outcomes):
        if outcome.status != 0:
            raise RuntimeError(f"rank {rank} ended with status {outcome.status}: {outcome.told}")
    return [outcome.result for outcome in outcomes]


def _start(
    setting: Setting, case: str, rank: int, ranks: int, port: int, folder: Path, arguments: dict[str, Any]
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "SCHEDC_GPU_RESULT": str(folder / f"{rank}.json"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "gpu.ranks", setting.device.type, case, json.dumps(arguments)]
    with open(folder / f"{rank}.txt", "wb") as told:
        return subprocess.Popen(command, env=environment, stdout=told, stderr=told)


def main(device: str, case: str, arguments: str) -> None:
    """One rank: join the others, run the case, write its result."""
    import schedc_runtime

    place = schedc_runtime.join("gloo" if device == "cpu" else None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    result = getattr(import_module("gpu.rank_cases"), case)(place, rank, ranks, **json.loads(arguments))
    Path(os.environ["SCHEDC_GPU_RESULT"]).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
