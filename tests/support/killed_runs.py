"""Kills of ranks and of flushes, and what must be left: no torn state, nothing lost that was committed, equal bits."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch

from schedc_runtime.errors import MaterializeError
from schedc_runtime.keeper.flush import flush
from schedc_runtime.keeper.places import SHARED_MEMORY, Places, RankHere
from schedc_runtime.ranks.processes import this_process
from schedc_runtime.saved.form import step_folder
from schedc_runtime.saved.read import committed_steps, flaws, newest, open_step
from schedc_runtime.testing import pool
from schedc_runtime.trainers.image_writer import HeldBox, ImageWriter, state_size

POINTS = ("forward", "backward", "weight", "copy", "flip", "copied", "update", "updated")
"""Where a rank kills itself, as of `support.kept_runs`."""
CALLS = ("write", "fsync", "rename", "unlink", "open", "rmdir")
"""Calls of the system that a flush makes, before each of which it is killed once."""
_WORLD = 2


def value(step: int, rank: int) -> torch.Tensor:
    """[rows] what rank ``rank`` holds after ``step`` steps."""
    return torch.arange(1000.0) * (rank + 1) + step


def held(root: Path, memory: Path, step: int) -> tuple[Places, list[RankHere]]:
    """Two ranks whose images hold a state of ``step``."""
    places = Places.of_run(memory, "killed")
    for rank in range(_WORLD):
        box = HeldBox(f"model.{rank}", value(step, rank), (1000,), (0,))
        writer = ImageWriter(places, rank, state_size([box]))
        facts = {"attempt": f"attempt {step}", "facts": {}, "run": {}}
        writer.write(step % 2, [box], step, True, facts)
        writer.close()
    ranks = [RankHere(this_process(), None, -1, f"rank {rank}", rank, _WORLD, _WORLD, "", str(root), 2)
             for rank in range(_WORLD)]  # fmt: skip
    return places, ranks


def killed_flush(places: Places, ranks: Sequence[RankHere], step: int, at: int) -> bool:
    """Flush in a process that is killed before its call number ``at`` of the system; whether it was."""
    if (pid := os.fork()) == 0:
        left = [at]

        def counted(whole: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return whole(*arguments, **keywords)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        with suppress(BaseException):
            flush(places, ranks, step)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def torn(root: Path, steps: set[int]) -> str:
    """What is wrong with the states in a folder; "" if all committed ones are whole, and the newest is in ``steps``."""
    try:
        for number in committed_steps(root):
            if flaw := next(flaws(open_step(step_folder(root, number))), None):
                return str(flaw)
        step = newest(root).step
    except MaterializeError as error:
        return str(error)
    if step is None or step.step not in steps:
        return f"the newest state is {step and step.step}, not one of {sorted(steps)}"
    for name, (_, holdings) in step.tensors.items():
        (holding,) = holdings
        with holding.path.open("rb") as file:
            file.seek(holding.span.begin)
            content = torch.frombuffer(bytearray(file.read(4000)), dtype=torch.float32)
        if not torch.equal(content, value(step.step, int(name.removeprefix("model.")))):
            return f"{name} of step {step.step} is of another step"
    return ""


def killed_flushes(most: int = 1000) -> tuple[int, list[str]]:
    """A flush of a third state is killed at each of its calls, and so is a second; a third ends it.

    Returns the number of calls, and what failed.
    """
    failures: list[str] = []
    for at in range(most):
        with tempfile.TemporaryDirectory() as folder:
            root, memory = Path(folder) / "run", Path(folder)
            for step in (1, 2):
                flush(*held(root, memory, step), step)
            places, ranks = held(root, memory, 3)
            killed = killed_flush(places, ranks, 3, at)
            if why := torn(root, {2, 3} if killed else {3}):
                failures.append(f"killed at call {at}: {why}")
            killed_flush(places, ranks, 3, at // 2)
            flush(places, ranks, 3)
            if why := torn(root, {3}):
                failures.append(f"killed at call {at}, flushed again: {why}")
            if committed_steps(root)[-2:] != [2, 3]:
                failures.append(f"killed at call {at}: committed are {committed_steps(root)}")
            if not killed:
                return at, failures
    return most, failures


def killed_trainings(
    ranks: int, schedules: Sequence[str], points: Sequence[str], seeds: Sequence[int], root: Path
) -> Iterator[tuple[str, str]]:
    """A rank is killed in a training, which then goes on. Yields each case, and what is wrong with it, or ""."""
    workers, case = pool(ranks), "support.kept_runs:kept_run"
    for schedule in schedules:
        where: dict[str, Any] = {"schedule": schedule, "steps": 6}
        whole = workers.run(case, root=str(root / f"whole-{schedule}"), **where)[0][1]
        for point, seed in product(points, seeds):
            name, rank, step = f"{schedule} {point} {seed}", seed % ranks, 1 + seed * 7 % 4
            folder = root / name.replace(" ", "-")
            outcomes = workers.outcomes(case, root=str(folder), kill=[rank, point, step], **where)
            if getattr(outcomes[rank], "kind", "") != "died":
                yield name, f"the rank was not killed: {outcomes[rank]}"
                continue
            _wait_until_clean()
            before = committed_steps(folder)
            last = max(before, default=-1)
            again = workers.run(case, root=str(folder), **where)
            lost = f"it began at {again[0][0]}, and {before} were committed" if again[0][0] < last else ""
            late = "" if last >= step - 1 else f"step {last} is left of {step}"
            yield name, lost or late or ("" if again[0][1] == whole else "the end state has other bits")
            _wait_until_clean()
            shutil.rmtree(folder)


def _wait_until_clean(seconds: float = 20.0) -> None:
    """Wait until the keepers of this user have written and removed all images."""
    deadline = time.monotonic() + seconds
    while any(SHARED_MEMORY.glob(f"schedc-{os.getuid()}-*")):
        if time.monotonic() > deadline:
            raise TimeoutError("images are left in shared memory")
        time.sleep(0.02)


def kills(seconds: float = 1500.0) -> dict[str, Any]:
    """Every point of a training on four ranks under two schedules with five seeds, then every call of a flush.

    Ends behind ``seconds``; `planned` says how many cases there would have been.
    """
    begin, cases, failures = time.monotonic(), 0, list[str]()
    planned = 2 * len(POINTS) * 5
    with tempfile.TemporaryDirectory() as folder:
        trainings = killed_trainings(4, ("1f1b", "zbv"), POINTS, range(5), Path(folder))
        for name, why in trainings:
            cases += 1
            failures += [f"{name}: {why}"] if why else []
            if time.monotonic() - begin > seconds:
                break
    flushes, more = killed_flushes()
    unequal = sum("other bits" in each for each in failures)
    lost = sum("committed" in each or "is left" in each for each in failures)
    told = {"cases": cases + flushes, "failed": len(failures + more), "failures": (failures + more)[:50]}
    return {**told, "torn": len(more), "lost": lost, "unequal": unequal, "planned": planned + flushes}
