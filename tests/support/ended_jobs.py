"""Ends jobs that keep their states by a signal to one process, and looks how soon nothing is left but the state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from schedc_runtime.keeper.flush import held_steps
from schedc_runtime.keeper.places import SHARED_MEMORY, Places
from schedc_runtime.saved.read import newest
from support.paths import ROOT
from support.restarted_jobs import CLEAN, left_behind, run_job, run_name
from support.warm_command import run_schedc

RANKS, ENOUGH = 2, 100_000
_TRAINED = 3
"""Steps behind which a job is ended."""
_TORCHRUN = ["--nproc-per-node", str(RANKS), "-m", "support.restarted_ranks"]
SOON = 5.0
"""Seconds within which SIGTERM to a launcher must have ended all, with the newest step on disk."""
_START = 90.0
_LOOK = 0.01


class Case(NamedTuple):
    """command: of `COMMANDS`. who: whose process gets the signal. number: of the signal."""

    command: str
    who: str
    number: signal.Signals


class Ending(NamedTuple):
    """How a job ended. seconds: from the signal until nothing was left. held: the newest step in memory before.

    kept: the newest step on disk in the end. left: what was left behind `CLEAN` seconds.
    """

    seconds: float
    held: int
    kept: int
    left: list[str]


def _torchrun(folder: Path) -> list[str]:
    return [*_TORCHRUN, *_arguments(folder)]


def _arguments(folder: Path) -> list[str]:
    return [str(folder), "none", "0", str(ENOUGH)]


def _run(folder: Path) -> list[str]:
    sizes = ["-D", f"P={RANKS}", "-D", "M=2", "--steps", str(ENOUGH), "--width", "16"]
    return ["run", "1f1b", *sizes, "--checkpoints", str(folder / "run")]


WARM: dict[str, Callable[[Path], object]] = {
    "torchrun": lambda folder: run_job(_arguments(folder), RANKS),
    "schedc run": lambda folder: run_schedc(_run(folder)),
}
"""Commands that need not load torch: a server forks their processes."""
COLD: dict[str, Callable[[Path], list[str]]] = {
    "torchrun": lambda folder: ["torch.distributed.run", *_torchrun(folder)],
    "schedc torchrun": lambda folder: ["schedc", "torchrun", *_torchrun(folder)],
    "schedc run": lambda folder: ["schedc", *_run(folder)],
}
"""Commands as a user starts them: the arguments of ``python -m``."""
CASES = (
    Case("torchrun", "launcher", signal.SIGTERM),
    Case("schedc torchrun", "launcher", signal.SIGTERM),
    Case("schedc run", "command", signal.SIGTERM),
    Case("schedc run", "launcher", signal.SIGTERM),
    Case("torchrun", "launcher", signal.SIGKILL),
    Case("torchrun", "rank", signal.SIGKILL),
    Case("torchrun", "keeper", signal.SIGKILL),
    Case("schedc torchrun", "launcher", signal.SIGKILL),
    Case("schedc torchrun", "spare", signal.SIGKILL),
    Case("schedc run", "command", signal.SIGKILL),
    Case("schedc run", "launcher", signal.SIGKILL),
    Case("schedc run", "rank", signal.SIGKILL),
)


def ended(case: Case, warm: bool = False) -> Ending:
    """Start a job, end it when it has trained some steps, and wait until nothing of it is left.

    A job goes on without its keeper and starts another: behind the keeper's death the launcher gets SIGTERM too.
    """
    with TemporaryDirectory() as place:
        folder = Path(place)
        thread = threading.Thread(target=WARM[case.command] if warm else _cold(case.command), args=(folder,))
        thread.start()
        roles = _roles(folder, "" if warm else case.command, thread)
        pids = {pid for pids in roles.values() for pid in pids}
        held = _held(folder)
        os.kill(roles[case.who][0], case.number)
        if case.who == "keeper":
            _wait(lambda: _held(folder) > held + _TRAINED, thread)
            pids |= {_places(folder).watch().process.pid}  # type: ignore[union-attr]
            held = _held(folder)
            os.kill(roles["launcher"][0], signal.SIGTERM)
        began = time.monotonic()
        while (left := left_behind(folder, pids)) and time.monotonic() < began + CLEAN:
            time.sleep(_LOOK)
        seconds = time.monotonic() - began
        for pid in pids if left else ():
            _end(pid)
        thread.join()
        step = newest(folder / "run").step
        return Ending(seconds, held, -1 if step is None else step.step, left)


def flaw(case: Case, ending: Ending) -> str:
    """What is wrong with an ending; "" if all was kept, and gone in time."""
    if ending.left:
        return f"left behind {', '.join(ending.left)}"
    if ending.kept < ending.held:
        return f"step {ending.held} was in memory, and step {ending.kept} is on disk"
    late = case.number == signal.SIGTERM and ending.seconds > SOON
    return f"it took {ending.seconds:.1f} s" if late else ""


def _cold(command: str) -> Callable[[Path], object]:
    def start(folder: Path) -> object:
        paths = os.pathsep.join(str(ROOT / each) for each in ("", "runtime", "tests"))
        environment = {**os.environ, "PYTHONPATH": paths}
        arguments = [sys.executable, "-m", *COLD[command](folder)]
        return subprocess.run(arguments, env=environment, cwd=ROOT, capture_output=True, check=False)

    return start


def _roles(folder: Path, command: str, thread: threading.Thread) -> dict[str, list[int]]:
    """The processes of a job by role, once it has trained some steps."""
    _wait(lambda: run_name(folder) is not None and _held(folder) >= _TRAINED, thread)
    places = _places(folder)
    trainers, watch = list(places.trainers()), places.watch()
    assert watch is not None
    ranks = [trainer.process.pid for trainer in trainers]
    parent, agent = _parent(ranks[0]), trainers[0].agent
    launcher = parent if agent is None else agent.pid
    roles = {"rank": ranks[::-1], "keeper": [watch.process.pid], "launcher": [launcher]}
    if command == "schedc torchrun":
        roles["spare"] = [parent]
    if command == "schedc run":
        roles["command"] = [_parent(parent)]
    return roles


def _wait(condition: Callable[[], bool], thread: threading.Thread) -> None:
    deadline = time.monotonic() + _START
    while not condition():
        assert thread.is_alive(), "the job has ended"
        assert time.monotonic() < deadline, "the job does not train"
        time.sleep(_LOOK)


def _held(folder: Path) -> int:
    """The newest step that all ranks of a job have in memory; -1 without one."""
    places = _places(folder)
    ranks = [places.images(rank) for rank in range(RANKS)]
    held = held_steps(ranks) if all(ranks) else []
    for image in (image for images in ranks for image in images):
        image.close()
    return held[0].step if held else -1


def _places(folder: Path) -> Places:
    return Places(SHARED_MEMORY / f"schedc-{os.getuid()}-{run_name(folder)}")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
