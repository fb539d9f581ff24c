"""Signals to a launcher, to the command that started it, and to ranks: ends, delays, and messages."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from schedc import interrupts
from schedc.cli.processes import handed_over, run_to_end
from schedc.interrupts import end_with
from schedc_runtime.commands.launch import launch
from schedc_runtime.testing import PRELOADED
from support.warm_command import run_torchrun

ENDINGS = ("SIGTERM", "SIGHUP", "SIGKILL")
SOON = 2.0
"""Seconds within which every process must have ended."""


def forked(target: Callable[..., None], folder: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=(str(folder),))
    process.start()
    return process


def started(folder: Path, count: int) -> list[int]:
    """The ids that ``count`` processes have written into the folder."""
    deadline = time.monotonic() + 60
    while len(files := list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(file.stem) for file in files]


def left_after(seconds: float, pids: list[int]) -> list[int]:
    """Those of the processes that have not ended by then."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    """A rank: it ignores SIGTERM, as a stuck rank does, and rank 1 waits in C."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "1":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    Path(arguments[0], f"{os.getpid()}.pid").touch()
    while True:
        time.sleep(60)


def launcher(folder: str) -> None:
    sys.exit(launch(__name__, [folder], 3))


def elsewhere(folder: str) -> None:
    """A launcher where no kernel tells of a parent's end."""
    interrupts._LIBRARY = None
    launcher(folder)


def command(folder: str) -> None:
    with handed_over({"--file": b"handed over"}) as files:
        script = f"cat {files.options[1]} > {folder}/read; touch {folder}/$$.pid; exec sleep 60"
        sys.exit(run_to_end(["sh", "-c", script], files.descriptors))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("target", "count", "name"),
    [
        *[(target, count, name) for target, count in ((launcher, 3), (command, 1)) for name in ENDINGS],
        (elsewhere, 3, "SIGKILL"),
    ],
)
def test_all_end_with_the_process_that_started_them(
    target: Callable[[str], None], count: int, name: str, tmp_path: Path
) -> None:
    process, number = forked(target, tmp_path), signal.Signals[name]
    try:
        pids = started(tmp_path, count)
        assert process.pid is not None
        os.kill(process.pid, number)
        assert left_after(SOON, [*pids, process.pid]) == []
        process.join()
        assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
        if target is command:
            assert (tmp_path / "read").read_text() == "handed over"
    finally:
        for pid in [*map(int, (file.stem for file in tmp_path.glob("*.pid"))), process.pid or 0]:
            if pid and _runs(pid):
                os.kill(pid, signal.SIGKILL)


def orphan(folder: str) -> None:
    """A process with another process as parent."""
    Path(folder, f"{os.getpid()}.pid").touch()
    end_with(1 << 30)
    time.sleep(60)


@pytest.mark.processes
def test_a_child_whose_parent_has_gone_ends(tmp_path: Path) -> None:
    """It ended before the kernel was asked to tell of its end."""
    process = forked(orphan, tmp_path)
    assert left_after(SOON, started(tmp_path, 1)) == []
    process.join()
    assert process.exitcode == -signal.SIGKILL


TRAINER = """
import os, signal, threading
import torch
from torch import nn
from torch.distributed import HashStore
import schedc
from schedc_runtime import Pipeline, join

torch.set_num_threads(1)
join("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
torch.manual_seed(0)
program = schedc.compile("1f1b", P=2, M=2)
pipe = Pipeline(model, program, loss_fn=nn.functional.mse_loss, example=torch.ones(2, 4))
batch = torch.ones(4, 4), torch.zeros(4, 4)
pipe.step(*batch)
if os.fork() == 0:  # as a worker of a loader: its end is no matter of the rank's
    os.kill(os.getpid(), signal.SIGTERM)
os.wait()
if os.environ["RANK"] == "0":
    pipe.partition.modules[0].register_forward_hook(lambda *_: HashStore().get("never"))  # a wait in C
else:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
pipe.step(*batch)
"""


@pytest.mark.processes
def test_a_survivor_under_torchrun_says_who_was_lost(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    done = run_torchrun(["--nproc-per-node", "2", str(tmp_path / "trainer.py")])
    assert done.returncode != 0
    assert len(re.findall("^schedc: ", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert re.search(
        r"^schedc: rank 1 \(pid \d+\) is dead: .*; it was in step 2 at 1WAIT_RECV_F0: .*; rank 0 was ended by SIGTERM;"
        r" it was in step 2 at 0F0 --> ",
        done.stderr,
        re.MULTILINE,
    ), done.stderr
