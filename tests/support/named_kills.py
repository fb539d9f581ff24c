"""Kills one of four ranks under torchrun, and looks when and how the others name it.

torchrun sends SIGTERM to the others 0.04 to 0.6 s after a death. So a report may come from a rank that has found the
death, or from one that the signal ends.
"""

from __future__ import annotations

import re
import threading
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from support.warm_command import run_torchrun

RANKS = 4
PLACES = {"forward": "F", "backward": "B", "wait": "WAIT_"}
"""By place of a death: a part of the name of the instruction."""
SOON = 1.0
"""Seconds within which a death must be reported."""
_LOOK = 0.005

TRAINER = """
import os, signal, sys, threading, time, traceback
import torch
from torch import nn
import schedc
from schedc_runtime import Pipeline, join

folder, victim, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.dup2(os.open(f"{folder}/errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
torch.set_num_threads(1)
join("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
program = schedc.compile("1f1b", P=4, M=8)
pipe = Pipeline(model, program, loss_fn=nn.functional.mse_loss, example=torch.ones(2, 4), timeout=60)
batch = torch.ones(16, 4), torch.zeros(16, 4)
pipe.step(*batch)


def die(*_):
    with open(f"{folder}/killed", "w") as file:
        file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


calls = iter(range(100))


def third(act):
    return lambda *_: act() if next(calls) == 3 else None


module = pipe.modules[0]
if place == "wait" and pipe.rank == (victim + 1) % 4:
    module.register_forward_hook(third(lambda: time.sleep(1.0)))
elif place == "wait" and pipe.rank == victim:
    threading.Timer(0.5, die).start()
elif pipe.rank == victim and place == "forward":
    module.register_forward_hook(third(die))
elif pipe.rank == victim:
    module.register_full_backward_pre_hook(third(die))
try:
    pipe.step(*batch)
except Exception:
    traceback.print_exc()  # torch's agent keeps it to itself where it forks the ranks
    sys.exit(1)
"""


class Report(NamedTuple):
    """What was printed of a death. instruction: where the rank died, or "". seconds: until then; -1: never."""

    instruction: str
    seconds: float


def killed(victim: int, place: str) -> tuple[Report, str]:
    """The report of one training in which ``victim`` dies at a `PLACES`, and all that was printed."""
    told = re.compile(rf"rank {victim} \(pid \d+\) is dead: [^;]*; it was in step 2 at (\S+?):? ")
    with TemporaryDirectory() as place_of_run:
        folder = Path(place_of_run)
        (folder / "trainer.py").write_text(TRAINER)
        arguments = ["--nproc-per-node", str(RANKS), str(folder / "trainer.py"), place_of_run, str(victim), place]
        run = threading.Thread(target=run_torchrun, args=(arguments,))
        run.start()
        seen, errors = 0.0, folder / "errors"
        while run.is_alive():
            if not seen and errors.exists() and told.search(errors.read_text()):
                seen = time.time()
            run.join(_LOOK)
        text = errors.read_text() if errors.exists() else ""
        found = told.search(text)
        died = float((folder / "killed").read_text()) if (folder / "killed").exists() else 0.0
        seconds = (seen or time.time()) - died if found and died else -1.0
    return Report(found[1] if found else "", seconds), text


def named(kills: int = 40) -> dict[str, Any]:
    """The figures of the word ``named``: `cases`, `failed`, `reported`, `seconds_max`, and what failed."""
    cases = list(product(PLACES, range(RANKS)))
    reports, failures = [], []
    for number in range(kills):
        place, victim = cases[number % len(cases)]
        report, text = killed(victim, place)
        reports.append(report)
        if PLACES[place] not in report.instruction or not 0 <= report.seconds <= SOON:
            failures.append(f"rank {victim} in {place}: {report}; printed: {text[-2000:]}")
    reported = [report for report in reports if report.instruction]
    seconds = max((report.seconds for report in reported), default=-1.0)
    figures = {"cases": kills, "failed": len(failures), "reported": len(reported), "seconds_max": round(seconds, 3)}
    return {**figures, "failures": failures}
