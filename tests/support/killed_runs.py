"""Kills of ranks and of flushes, and what must be left: no torn state, nothing lost that was committed, equal bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

import schedc
from schedc_runtime.errors import MaterializeError
from schedc_runtime.keeper.flush import flush
from schedc_runtime.keeper.places import SHARED_MEMORY, Places, RankHere
from schedc_runtime.ranks.processes import this_process
from schedc_runtime.saved.form import step_folder
from schedc_runtime.saved.read import committed_steps, flaws, newest, open_step
from schedc_runtime.testing import RankPool
from schedc_runtime.trainers.box_file import HeldBox
from schedc_runtime.trainers.image_writer import ImageWriter, state_size
from support.kept_runs import POINTS

CASE = "support.kept_runs:kept_run"
STEPS = 14
"""Updates of a run that is killed `CHAIN` times, each time less than two steps behind where it began."""
CHAIN = 6
CALLS = ("write", "fsync", "rename", "unlink", "open", "rmdir")
"""Calls of the system that a flush makes, before each of which it is killed once."""
_WORLD = 2
_Chain = tuple[int, list[str]]


def value(step: int, rank: int) -> torch.Tensor:
    """[rows] what rank ``rank`` holds after ``step`` steps."""
    return torch.arange(1000.0) * (rank + 1) + step


def held(root: Path, memory: Path, step: int, attempts: Sequence[str] = ()) -> tuple[Places, list[RankHere]]:
    """Two ranks whose images hold a state of ``step``. attempts: [ranks] that have copied it; by default the same."""
    places = Places.of_run(memory, "killed")
    for rank in range(_WORLD):
        box = HeldBox(f"model.{rank}", value(step, rank), (1000,), (0,))
        writer = ImageWriter(places, rank, state_size([box]))
        facts = {"attempt": attempts[rank] if attempts else f"attempt {step}", "facts": {}, "run": {}}
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


def killed_flushes(most: int = 1000, every: int = 1) -> tuple[int, list[str]]:
    """A flush of a third state is killed at each of its calls, and so is a second; a third ends it.

    every: step between the calls that are tried. Returns the number of calls, and what failed.
    """
    failures: list[str] = []
    for at in range(0, most, every):
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


class Case(NamedTuple):
    """One attempt that is killed. kills: each [rank, point, steps behind its first one, seed].

    keeper: seconds behind the first death after which the keeper is killed, too; None: it lives.
    """

    schedule: str
    kills: tuple[tuple[int, str, int, int], ...]
    keeper: float | None = None

    @property
    def name(self) -> str:
        told = ", ".join(f"rank {rank} at {point} +{behind} ({seed})" for rank, point, behind, seed in self.kills)
        return f"{self.schedule}: {told}{'' if self.keeper is None else f', the keeper {self.keeper:.2f} s later'}"


class Agent(RankPool):
    """Ranks that all die with the first of them, as under an agent that starts them anew."""

    keeper: Callable[[], None] | None = None
    """Called when the first rank has died."""

    def _answer(self, rank: int) -> Any:
        answer = super()._answer(rank)
        if getattr(answer, "kind", "") == "died" and all(worker.is_alive() for worker in self._workers[:rank]):
            if self.keeper is not None:
                self.keeper()
            for worker in self._workers:
                worker.kill()
        return answer


def points(schedule: str, ranks: int) -> list[tuple[int, str]]:
    """Every rank with every place where it can be killed."""
    program = schedc.compile(schedule, P=ranks, M=4)
    kinds = [sorted({each.kind.name for each in program.instructions(rank)}) for rank in range(ranks)]
    return [(rank, point) for rank in range(ranks) for point in (*kinds[rank], *POINTS, "meeting")]


def training_cases(schedules: Sequence[str], ranks: int, seeds: int, subsets: int) -> list[Case]:
    """Each place of each rank with each seed, then random sets of them; a third of the keepers are killed, too."""
    draw, cases = Random(0), list[Case]()

    def add(schedule: str, places: Sequence[tuple[int, str]]) -> None:
        kills = tuple((rank, point, draw.randrange(2), draw.randrange(1000)) for rank, point in places)
        cases.append(Case(schedule, kills, draw.choice([None, None, draw.uniform(0, 0.4)])))

    places = {schedule: points(schedule, ranks) for schedule in schedules}
    for schedule in schedules:
        for place, _ in product(places[schedule], range(seeds)):
            add(schedule, [place])
    for number in range(subsets):
        schedule = schedules[number % len(schedules)]
        add(schedule, draw.sample(places[schedule], draw.randint(2, ranks)))
    draw.shuffle(cases)
    return cases


def killed_chain(workers: Agent, cases: Sequence[Case], root: Path, whole: str, agent: bool) -> list[str]:
    """One run that is killed in each of ``cases`` of one schedule, goes on each time, and ends. Returns what is wrong.

    whole: digest at the end of an undisturbed run. agent: whether ranks have an agent, for which the keeper stays.
    """
    run: dict[str, Any] = {"root": str(root), "schedule": cases[0].schedule, "agent": agent, "light": True}
    failures, least = list[str](), 0
    for case in cases:
        committed, began = max(committed_steps(root), default=-1), _began(root)
        workers.keeper = None if case.keeper is None else partial(_kill_keeper, root, case.keeper)
        outcomes = workers.outcomes(CASE, timeout=180.0, steps=STEPS, kills=case.kills, **run)
        if not any(getattr(each, "kind", "") == "died" for each in outcomes):
            workers.close()
            return [*failures, f"{case.name}: nobody died: {outcomes}"]
        steps = _began(root)[len(began) :]
        if steps and steps[0] < max(least, committed):
            failures.append(f"{case.name}: it began at {steps[0]}; {least} was kept, {committed} committed")
        least = steps[0] + min(behind for _, _, behind, _ in case.kills) - 1 if steps else least
    workers.keeper = None
    first, digest, _ = workers.run(CASE, steps=STEPS, **run)[0]
    names = "; ".join(case.name for case in cases)
    if first < least:
        failures.append(f"{names}: it began at {first}; {least} was kept")
    if digest != whole:
        failures.append(f"{names}: the end state has other bits")
    failures += [f"{names}: torn: {flaw}" for flaw in damaged(root)]
    return failures


def damaged(root: Path) -> list[str]:
    """What is wrong with the committed steps of a folder."""
    return [str(flaw) for number in committed_steps(root) for flaw in flaws(open_step(step_folder(root, number)))]


def _began(root: Path) -> list[int]:
    """The steps at which the attempts of a run began."""
    path = Path(f"{root}.began")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _memory(root: Path) -> Path:
    """The folder of a run's images."""
    return SHARED_MEMORY / f"schedc-{os.getuid()}-{json.loads((root / 'run.json').read_text())['run']}"


def _stays(path: Path, seconds: float = 20.0) -> bool:
    """Whether a folder is still there when so much time has passed."""
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def _kill_keeper(root: Path, seconds: float) -> None:
    time.sleep(seconds)
    if watch := Places(_memory(root)).watch():
        with suppress(ProcessLookupError):
            os.kill(watch.process.pid, signal.SIGKILL)


def killed_trainings(cases: Sequence[Case], ranks: int, root: Path, record: Path | None = None) -> Iterator[_Chain]:
    """Chains of killed attempts. record: file of the finished ones, which are not run again.

    Yields each chain: number of cases, and faults.
    """
    workers, wholes = Agent(ranks), dict[str, str]()
    done: dict[str, Any] = dict(map(json.loads, record.read_text().splitlines())) if record and record.exists() else {}
    for schedule in dict.fromkeys(case.schedule for case in cases):
        ours = [case for case in cases if case.schedule == schedule]
        for number in range(0, len(ours), CHAIN):
            chain, name = ours[number : number + CHAIN], f"{schedule}-{number}"
            if name not in done:
                where = root / name
                if schedule not in wholes:
                    run = {"root": str(root / schedule), "schedule": schedule, "light": True}
                    wholes[schedule] = workers.run(CASE, steps=STEPS, **run)[0][1]
                wrong = killed_chain(workers, chain, where, wholes[schedule], agent=number // CHAIN % 2 == 0)
                left = [f"{name}: left in memory"] if _stays(_memory(where)) else []
                done[name] = wrong + left
                shutil.rmtree(where)
                if record:
                    with record.open("a") as file:
                        print(json.dumps([name, done[name]]), file=file)
            yield len(chain), done[name]
    workers.close()


def kills(cases: int | None = None, record: Path | None = None) -> dict[str, Any]:
    """Every place of a training on four ranks under two schedules, random sets of places, every call of a flush.

    cases: number of killed attempts of trainings; all if None. record: file of finished ones, to go on from.
    """
    planned = training_cases(("1f1b", "zbv"), 4, 9, 300)[:cases]
    done, failures = 0, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for count, wrong in killed_trainings(planned, 4, Path(folder), record):
            done, failures = done + count, failures + wrong
    flushes, more = killed_flushes()
    torn = sum("torn" in each for each in failures) + len(more)
    lost = sum("it began at" in each for each in failures)
    unequal = sum("other bits" in each for each in failures)
    killed = done + sum(case.keeper is not None for case in planned) + 2 * flushes
    told = {
        "cases": done + flushes,
        "kills": killed,
        "failed": len(failures + more),
        "torn": torn,
        "lost": lost,
        "unequal": unequal,
    }
    return {**told, "flushes": flushes, "failures": (failures + more)[:50]}
