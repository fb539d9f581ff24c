"""What interrupts a thread is counted: a core that another process has, and the garbage collector."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, thread_time

import pytest

from schedc_runtime.execute import interruptions
from schedc_runtime.execute.interruptions import Interruptions

_SPIN = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


def _idle() -> float:
    """Seconds that this thread did not run, from any beginning."""
    return monotonic() - thread_time()


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel keeps no such times")
def test_a_core_that_another_process_has_is_counted() -> None:
    """Two processes share a core. A thread that does not run then has no core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-S", "-c", _SPIN])
    try:
        with Interruptions() as interrupted:

            def off_core() -> float:
                return (interrupted.read().off_core - before) / 1e9

            busy, begun = thread_time(), monotonic()
            outer, before, inner = _idle(), interrupted.read().off_core, _idle()
            while thread_time() - busy < 0.1 or (monotonic() - begun < 60 and off_core() < 0.02):
                pass
            least, counted, most = _idle() - inner, off_core(), _idle() - outer
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
    assert counted >= 0.02
    room = 0.01 + 0.02 * (monotonic() - begun)
    assert least - room <= counted <= most + room, "time of a wall clock that the thread did not run"


@pytest.mark.slow
def test_garbage_collection_is_counted_while_the_context_is_open() -> None:
    before = list(gc.callbacks)
    with Interruptions() as interrupted:
        assert interrupted.read().collecting == 0
        garbage = [[] for _ in range(10_000)]
        gc.collect()
        counted = interrupted.read().collecting
        assert garbage
        assert counted > 0
    assert gc.callbacks == before
    gc.collect()
    assert interrupted.read().collecting == counted


def test_a_kernel_without_these_times_counts_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "_SCHEDSTAT", "/proc/none")
    with Interruptions() as interrupted:
        assert interrupted.read() == (0, 0)
