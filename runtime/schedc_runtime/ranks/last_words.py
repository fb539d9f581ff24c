"""The line on stderr of a rank that SIGTERM ends: the lost rank, and the current activity here.

torchrun sends SIGTERM to the other ranks as soon as one has died, often before they have found the cause themselves.
Python's handlers wait until the main thread leaves C code, such as a wait for a message. A thread therefore reads the
signals from a pipe, into which Python's own handler in C writes them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any

_LEFT = 2.0
"""Seconds for the line, when both threads have seen the signal."""
_speakers: weakref.WeakSet[Any] = weakref.WeakSet()
_once = threading.Lock()


def speak_at_the_end(speaker: Any) -> None:
    """Let ``speaker.last_words()`` be printed before SIGTERM ends this process. A weak reference holds it.

    A handler of the user stays: nothing is printed then. The same holds outside of the main thread.
    """
    _speakers.add(speaker)
    if threading.current_thread() is threading.main_thread() and _is_replaceable(signal.getsignal(signal.SIGTERM)):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if (before := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)  # it serves somebody else, as asyncio; the handler alone must do
        signal.signal(signal.SIGTERM, _heard)
        threading.Thread(target=_listen, args=(reading,), daemon=True, name="schedc-last-words").start()


def _is_replaceable(handler: Any) -> bool:
    """Whether a handler is the default, or that of torch's agent, which forked processes inherit."""
    return handler is signal.SIG_DFL or getattr(handler, "__module__", "").startswith("torch.distributed.elastic")


def _listen(reading: int) -> None:
    while numbers := os.read(reading, 64):
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _heard:
            _end()


def _heard(_number: int, _frame: FrameType | None) -> None:
    """The handler, where the main thread runs Python."""
    _end()


def _end() -> None:
    """Print the last words and end as SIGTERM does. The thread that comes second leaves it to the first."""
    if not _once.acquire(blocking=False):
        time.sleep(_LEFT)
    try:
        for speaker in list(_speakers):
            os.write(2, f"schedc: {speaker.last_words()}\n".encode())
    finally:
        if sys.platform == "linux":
            ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python's own function is for the main thread alone
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_LEFT)
        os._exit(128 + signal.SIGTERM)


def _forked() -> None:
    """A process that a rank has forked, as a loader of data, is no rank."""
    global _once
    _once = threading.Lock()
    _speakers.clear()
    if signal.getsignal(signal.SIGTERM) is _heard:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forked)
