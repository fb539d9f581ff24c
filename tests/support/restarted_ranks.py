"""A rank of a training under torchrun that meets a fault in its first attempt: ``-m support.restarted_ranks``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schedc_runtime import join
from schedc_runtime.ranks.agent import agent_here
from schedc_runtime.saved.form import COMMIT, step_folder
from schedc_runtime.stage.stage import Stage
from schedc_runtime.trainers import image_writer
from support.kept_runs import Run, bits

SCHEDULE, RANKS, STEPS, DURABLE = "1f1b", 4, 6, 2
AT = 3
"""The update in which a fault strikes: a state is on disk by then, or on its way."""
_SPEED = 8e6
"""Bytes a second that go to another node: a state takes several steps."""
_ADAM = sys.modules["torch.optim.adam"]
_FORWARD, _BACKWARD, _UPDATE = (Stage, "forward"), (Stage, "backward"), (_ADAM, "adam")
POINTS: dict[str, tuple[Any, str]] = {
    "forward": _FORWARD, "backward": _BACKWARD, "between": _UPDATE, "optimizer": (torch.Tensor, "addcdiv_"),
    "copy": (image_writer.torch, "_foreach_copy_"), "flush": _UPDATE, "keeper": _UPDATE, "agent": _FORWARD,
    "raise": _FORWARD, "memory": _BACKWARD,
}  # fmt: skip
"""By fault: the method in whose call it strikes, in update `AT` or behind it."""


def main(folder: Path, fault: str, victim: int, steps: int = STEPS, node: int = -1) -> None:
    """Train for so many updates. A fault of `POINTS` strikes once in a folder, at rank ``victim``.

    node: number of this rank's node, each of which has images of its own and copies of another's. ``now`` and
    ``beside``, ways to copy, are faults then: node ``victim`` is lost.
    """
    torch.set_num_threads(1)
    (folder / f"{os.getpid()}.pid").touch()
    if (agent := agent_here()) is not None:
        (folder / f"{agent.pid}.agent").touch()
    join("gloo")
    given: dict[str, Any] = {"durable": DURABLE}
    if node >= 0:
        given = {"durable": 1000, "memory": folder / f"node-{node}", "replicas": 1, "copy": fault, "peer_speed": _SPEED}
        given["memory"].mkdir(exist_ok=True)
    run = Run(folder / "run", SCHEDULE, dist.get_world_size(), in_process=False, **given)
    watch = run.saved.places.watch()
    assert watch is not None
    if fault in POINTS and run.pipe.rank == victim and not (folder / "struck").exists():
        _lay(run, *POINTS[fault], lambda: _strike(run, folder, fault, watch.process.pid))
    if node == victim and os.environ["LOCAL_RANK"] == "0" and not (folder / "struck").exists():
        run.optimizer.register_step_pre_hook(lambda *_: _lose(run, folder))
    first = run.train(steps)
    state = run.state()
    run.saved.close()
    if run.pipe.rank == 0:
        (folder / "end").write_text(json.dumps({"first": first, "digest": bits(state)}))
    run.pipe.close()
    dist.destroy_process_group()


def _lay(run: Run, owner: Any, name: str, strike: Callable[[], None]) -> None:
    """Let ``strike`` come before a call of a method in update `AT`, or in the one behind."""
    whole, calls, number = getattr(owner, name), count(1), 2 if owner in (Stage, torch.Tensor) else 1

    def call(*arguments: Any, **keywords: Any) -> Any:
        if run.saved.step >= AT and next(calls) == number:
            strike()
        return whole(*arguments, **keywords)

    setattr(owner, name, call)


def _strike(run: Run, folder: Path, fault: str, keeper: int) -> None:
    (folder / "struck").write_text(repr(time.time()))
    if fault == "raise":
        raise ZeroDivisionError("planted")
    if fault == "memory":
        torch.empty(1 << 60)
    if fault == "flush":
        threading.Thread(target=_when_written, args=(run, folder, keeper), daemon=True).start()
        return
    if fault == "keeper":
        os.kill(keeper, signal.SIGKILL)
        left = iter(range(2))
        run.optimizer.register_step_post_hook(lambda *_: next(left) == 0 or os.kill(os.getpid(), signal.SIGKILL))
        return
    agent = agent_here()
    os.kill(agent.pid if fault == "agent" and agent else os.getpid(), signal.SIGKILL)


def _lose(run: Run, folder: Path) -> None:
    """Kill agent, keeper and ranks of this node, and remove its memory, once neighbours have states of some updates."""
    if (run.saved._common or 0) < AT:
        return
    places, agent = run.saved.places, agent_here()
    watch, mates = places.watch(), [each.process.pid for each in places.trainers() if each.rank != run.pipe.rank]
    assert agent is not None
    assert watch is not None
    (folder / "struck").write_text(str(run.saved._common))
    for pid in (agent.pid, *mates, watch.process.pid):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(places.folder.parent)
    os.kill(os.getpid(), signal.SIGKILL)


def _when_written(run: Run, folder: Path, keeper: int) -> None:
    """Kill rank and keeper while the keeper writes a state."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        for step in range(AT, STEPS + 1):
            place = step_folder(run.saved.root, step)
            if place.exists() and not (place / COMMIT).exists():
                os.kill(keeper, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


def be_rank(arguments: Sequence[str]) -> None:
    """Run `main` with the arguments of a command line."""
    try:
        main(Path(arguments[0]), arguments[1], *map(int, arguments[2:]))
    except Exception:
        traceback.print_exc()  # torch's agent keeps it to itself where it forks the ranks
        sys.exit(1)


if __name__ == "__main__":
    be_rank(sys.argv[1:])
