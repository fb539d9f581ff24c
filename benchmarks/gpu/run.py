"""Runs the sections of a part in a process of their own, within the part's time, and keeps each result at once.

A hanging section costs no other section, and neither does an error of CUDA, which ends the process. The next section
gets a new process. A part whose time is over is cut, and the next run goes on there.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from gpu.parts import PARTS, failed, run_section
from gpu.state import ROOT, State

SECTION_LIMIT = 150.0
"""Seconds that a section may take, by default."""


class Limits(NamedTuple):
    """Seconds that a part may take, and a single section."""

    part: float = 300.0
    section: float = SECTION_LIMIT


def run_part(
    names: Sequence[str], state: State, device: str, repetitions: int, limits: Limits, quiet: bool
) -> list[str]:
    """Run the sections of a part that have no result yet. Returns the sections that were left when time was over."""
    deadline = time.monotonic() + limits.part
    todo = [name for name in names if not state.stands(name)]
    while todo and time.monotonic() < deadline:
        worker = _Worker(todo, device, repetitions)
        while todo:
            start = time.monotonic()
            entries = worker.next(min(deadline, start + limits.section))
            if entries is None and time.monotonic() >= deadline and time.monotonic() - start < limits.section:
                worker.end()
                return todo
            ended = entries is None
            entries = entries or failed(todo[0], worker.why(limits.section), device == "cuda")
            state.put(entries, todo[0], time.monotonic() - start)
            if not quiet:
                print(json.dumps(entries), flush=True)
            del todo[0]
            if ended:
                break
        worker.end()
    return todo


def worker_command(names: Sequence[str], device: str, repetitions: int) -> list[str]:
    """The command that runs sections in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--worker", device, *names]
    return [*command, "--repetitions", f"{repetitions}"]


class _Worker:
    """A process that runs sections one after the other, and prints the entries of each as a line."""

    def __init__(self, names: Sequence[str], device: str, repetitions: int) -> None:
        paths = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms ask for it
        self._process = subprocess.Popen(
            worker_command(names, device, repetitions), stdout=subprocess.PIPE, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._kept = b""

    def next(self, deadline: float) -> dict[str, Any] | None:
        """The entries of the next section; None if the process ends before, or the time is over."""
        assert self._process.stdout is not None
        while b"\n" not in self._kept:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            if not (part := os.read(self._process.stdout.fileno(), 1 << 16)):
                return None
            self._kept += part
        line, _, self._kept = self._kept.partition(b"\n")
        entries: dict[str, Any] = json.loads(line)
        return entries

    def why(self, limit: float) -> str:
        """Why the process gave no further result."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"it did not end within {limit:g} s"
        return f"its process ended with status {status}"

    def end(self) -> None:
        """End the process, and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def work(names: Sequence[str], device: str, repetitions: int) -> None:
    """What a worker's process does: run sections, and print the entries of each as a line to its standard output."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever sections print is no result
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps(run_section(name, torch.device(device), repetitions)), file=results, flush=True)


def status_of(state: State, names: Sequence[str], cut: Sequence[str]) -> int:
    """1 if a section failed or a claim that must hold is not met; 3 if time was over; else 0."""
    judged = [(name, claim) for name in names if name in state.results for claim in state.results[name]["claims"]]
    broken = [name for name in names if str(state.results.get(name, {}).get("result", "")).startswith("failed")]
    broken += [name for name, claim in judged if claim["must"] and claim["met"] is False]
    return 1 if broken else 3 if cut else 0


def chosen(words: Sequence[str]) -> dict[str, list[str]]:
    """The sections to run, by part. words: parts and sections; all without any. Raises KeyError for another word."""
    wanted: list[str] = []
    for word in words or PARTS:
        if word not in PARTS and not any(word in names for names in PARTS.values()):
            raise KeyError(word)
        wanted += PARTS.get(word, (word,))
    return {part: here for part, names in PARTS.items() if (here := [name for name in names if name in wanted])}
