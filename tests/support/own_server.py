"""Forks the processes of a test from a server of its own, which has loaded libraries that other tests do not need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from unittest import mock

from schedc_runtime.testing import PRELOADED


@contextmanager
def loaded_before(*modules: str) -> Iterator[None]:
    """Processes that start inside, a `RankPool` too, have these modules. They must end before the context does."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOADED, *modules])
    start = server.connect_to_new_process
    with mock.patch.multiple(forkserver, connect_to_new_process=start, set_forkserver_preload=lambda _: None):
        try:
            yield
        finally:
            server._stop()  # type: ignore[attr-defined]
