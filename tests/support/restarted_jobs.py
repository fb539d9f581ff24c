"""Trainings under torchrun that meet a fault and go on, and launchers that are ended: bits, seconds, what is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from multiprocessing import forkserver
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from schedc_runtime.keeper.places import SHARED_MEMORY
from schedc_runtime.ranks.agent import AGENT, SPARE
from schedc_runtime.testing import PRELOADED
from support.restarted_ranks import AT, POINTS, RANKS, be_rank

CLEAN = 10.0
"""Seconds within which processes and memory of a run must be gone, behind its end."""
_LOOK = 0.02


class Outcome(NamedTuple):
    """How a training ended. first: the update at which the last attempt began. seconds: until nothing was left.

    left: what was left behind `CLEAN` seconds. printed: on stderr.
    """

    first: int
    digest: str
    seconds: float
    left: list[str]
    printed: str


def train(fault: str = "", victim: int = 0, ranks: int = RANKS, attempts: int = 2) -> Outcome:
    """A training that meets a fault at rank ``victim``, and goes on. It is started anew where its agent is killed."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        for _ in range(attempts):
            _job(folder, fault, victim, ranks)
            if (folder / "end").exists() or fault != "agent":
                break
            left_of(folder, CLEAN)
        return outcome_in(folder)


def outcome_in(folder: Path) -> Outcome:
    """How the training in a folder has ended. Waits until nothing of it is left."""
    began = time.monotonic()
    left = left_of(folder, CLEAN)
    seconds = time.monotonic() - began
    end = json.loads((folder / "end").read_text()) if (folder / "end").exists() else {"first": -1, "digest": ""}
    printed = (folder / "printed").read_text() if (folder / "printed").exists() else ""
    return Outcome(end["first"], end["digest"], seconds, left, printed)


def _job(folder: Path, fault: str, victim: int, ranks: int) -> None:
    run_job([str(folder), fault or "none", str(victim)], ranks, restarts=1)


def run_job(
    arguments: list[str], ranks: int, restarts: int = 0, timeout: float = 120.0, meeting: Sequence[str] = ()
) -> None:
    """Run a torchrun of `support.restarted_ranks` until it ends or is killed.

    ranks: on this node. meeting: options of torchrun's rendezvous; by default this node is alone.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_agent, args=(arguments, ranks, restarts, meeting))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.terminate()
        process.join()
        with Path(arguments[0], "printed").open("a") as file:
            file.write(f"torchrun did not end within {timeout:g} s\n")


def _agent(arguments: list[str], ranks: int, restarts: int, meeting: Sequence[str]) -> None:
    """Be torchrun's agent. The server that has forked this process forks the ranks: this one has threads."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    os.dup2(os.open(Path(arguments[0], "agent"), os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    if meeting:  # a node that joins later does not find the store of the first attempt
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meeting = meeting or ["--rdzv-endpoint", "localhost:0", "--rdzv-id", str(uuid.uuid4())]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    options = ["--rdzv-backend", "c10d", *meeting, "--start-method", "forkserver"]
    options += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "none"]
    config, _, _ = config_from_args(get_args_parser().parse_args(options))
    elastic_launch(config, _rank)(str(os.getpid()), *arguments)


def _rank(agent: str, *arguments: str) -> None:
    """Be a rank, as `schedc torchrun` starts it."""
    printed = os.open(Path(arguments[0], "printed"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.environ.update({AGENT: agent, SPARE: str(os.getppid()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    be_rank(arguments)


def left_of(folder: Path, seconds: float) -> list[str]:
    """What is left of a training behind so many seconds. Returns as soon as nothing is."""
    deadline = time.monotonic() + seconds
    pids = {int(path.stem) for path in [*folder.glob("*.pid"), *folder.glob("*.agent")]}
    while (left := left_behind(folder, pids)) and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return left


def left_behind(folder: Path, pids: Iterable[int]) -> list[str]:
    """Which of these processes run, and the keepers and places in memory that the run in a folder has now."""
    alive = [f"process {pid}" for pid in sorted(pids) if _runs(pid)]
    if (name := run_name(folder)) is None:
        return alive
    places = [str(path) for path in SHARED_MEMORY.glob(f"schedc-{os.getuid()}-{name}*")]
    return alive + places + [f"keeper {pid}" for pid in keepers(name)]


def run_name(folder: Path) -> str | None:
    """The name of the run in a folder; None before it has one."""
    path = folder / "run" / "run.json"
    name: str | None = json.loads(path.read_text())["run"] if path.exists() else None
    return name


def keepers(run: str) -> list[int]:
    """Processes whose command line names a run."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"-{run}".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def judged(fault: str, victim: int, outcome: Outcome, whole: str) -> str:
    """What is wrong with a training that met a fault; "" if it went on and ended with the bits ``whole``."""
    if outcome.first <= 0:
        return f"it did not go on: {outcome.printed[-2000:]}"
    if outcome.first < AT - 1:
        return f"it went on at update {outcome.first}"
    if outcome.digest != whole:
        return "it ended with other bits"
    return f"left behind: {', '.join(outcome.left)}" if outcome.left else ""


def restart(cases: int = len(POINTS) * RANKS, endings: int | None = None) -> dict[str, Any]:
    """The figures of the word ``restart``: trainings that go on under torchrun, and jobs that are ended.

    cases: number of trainings. endings: number of jobs that are ended, by default all of `support.ended_jobs`.
    """
    from support.ended_jobs import CASES, SOON, ended, flaw

    whole, failures, resumed, equal = train().digest, list[str](), 0, 0
    left, soonest = 0, list[float]()
    for fault, victim in [*product(POINTS, range(RANKS))][:cases]:
        outcome = train(fault, victim)
        resumed, equal = resumed + (outcome.first > 0), equal + (outcome.digest == whole)
        left += len(outcome.left)
        if why := judged(fault, victim, outcome, whole):
            failures.append(f"{fault} of rank {victim}: {why}")
    for case in CASES[:endings]:
        ending = ended(case)
        left += len(ending.left)
        if case.number == SIGTERM:
            soonest.append(ending.seconds)
        if why := flaw(case, ending):
            failures.append(f"{case.number.name} to the {case.who} of {case.command}: {why}")
    return {
        "cases": cases + len(CASES[:endings]), "failed": len(failures), "resumed": resumed, "equal": equal,
        "sigterm_seconds_max": round(max(soonest, default=0.0), 2), "sigterm_seconds": SOON, "left_behind": left,
        "failures": failures,
    }  # fmt: skip
