"""Shows where a rank is in Python to other processes of its machine, also while its main thread holds Python's lock.

A rank that gets SIGUSR1 writes its stack into a file in memory: faulthandler does so in C, without the lock. The
signal is sent only to ranks that offer this. A program that handles SIGUSR1 itself offers nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time

from schedc_runtime.ranks.processes import Process, has_ended

_WAIT = 0.5
"""Seconds that a rank has to write its stack."""
_FRAMES = 4
"""How many of the innermost calls are shown."""
_offered = -1


def offer() -> int:
    """The descriptor of the file to which SIGUSR1 writes this process's stack; -1 if the signal is used otherwise."""
    global _offered
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return -1
    if _offered < 0:
        try:
            _offered = os.memfd_create("schedc-stack")
            faulthandler.register(signal.SIGUSR1, file=_offered, all_threads=False)
        except (AttributeError, OSError):
            return -1
    return _offered


def stack_of(process: Process, descriptor: int) -> list[str]:
    """The innermost calls of another process of this machine, innermost first; [] if it does not show them.

    descriptor: what the process has offered.
    """
    if descriptor < 0 or has_ended(process):
        return []
    try:
        with open(f"/proc/{process.pid}/fd/{descriptor}", "rb") as file:
            before = os.fstat(file.fileno()).st_size
            os.kill(process.pid, signal.SIGUSR1)
            return _read(file.fileno(), before)
    except OSError:
        return []


def _read(file: int, before: int) -> list[str]:
    """The calls that are written behind ``before`` bytes, once the file no longer grows."""
    deadline, size = time.monotonic() + _WAIT, before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        last, size = size, os.fstat(file).st_size
        if size == last > before:
            break
    lines = os.pread(file, size - before, before).decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.startswith("  File")][:_FRAMES]
