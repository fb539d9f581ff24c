"""Ctrl-C (SIGINT) among several processes: it is for the one that the user started, which ends the others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


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
