"""Signals among several processes: Ctrl-C is for the process that the user started; all others end with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_LOOK = 0.5
"""Seconds between two looks for the parent, where the kernel does not tell of its end."""
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
"""The C library, loaded before any fork."""


@contextmanager
def unheard() -> Iterator[None]:
    """Block SIGINT in this thread; a process started meanwhile never gets it, however far it is in its own start.

    A terminal sends SIGINT to all processes of a command. One that came here in between is delivered at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs inside by SystemExit with 128 + the signal, so that it ends its processes.

    A further signal is ignored meanwhile. A signal that was ignored before stays ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDINGS}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _exit)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def end_with(parent: int) -> None:
    """Let this process be killed at the end of its parent, in any case. parent: its process id, from before the fork.

    On Linux the kernel sends SIGKILL, also after an exec. Elsewhere a thread looks for the parent.
    """
    if _LIBRARY is None or _LIBRARY.prctl(_PARENT_DEATH, signal.SIGKILL):
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="schedc-parent").start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGKILL)
