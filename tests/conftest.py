"""Settings of all tests: properties take their time, and no test depends on the terminal that starts it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from support.sweeps import leave_out

settings.register_profile("schedc", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("schedc")

# Tests and their ranks run side by side: threads that wait for each other in a busy loop would take the cores.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Inductor would start processes with torch, one for each core, to compile the few kernels of a test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# torch's store asks for the name of 127.0.0.1 at every connection. A name server that drops questions takes 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
    os.environ.pop(name, None)

# The JSON of every command that a test runs in its process has the form of the table of outputs.
if find_spec("jsonschema_rs"):
    from support.outputs import hold_outputs

    hold_outputs()

# A shell starts what runs in its background deaf to Ctrl-C, and so would be the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = {
    "project/test_docs.py": 277,
    "project/test_site.py": 249,
    "runtime/kernels/test_kernels.py": 180,
    "runtime/moe/test_even_rows.py": 178,
    "compiler/formulas/test_formulas.py": 156,
    "runtime/keeper/test_kept_jobs.py": 131,
    "runtime/compiled/test_units.py": 106,
    "runtime/trainers/test_checkpoint.py": 86,
    "runtime/tensor_parallel/test_tensor_parallel.py": 80,
    "project/test_library_orders.py": 78,
    "runtime/device/test_rules.py": 78,
    "runtime/moe/test_hot.py": 73,
    "runtime/transit/test_transit.py": 68,
    "runtime/keeper/test_checkpoints.py": 67,
    "project/test_dist.py": 64,
    "runtime/tensor_parallel/test_loss_by_vocabulary.py": 54,
    "runtime/pipeline/test_loop.py": 53,
    "runtime/pipeline/test_chunked_loss.py": 52,
    "runtime/trainers/test_trainers.py": 46,
    "runtime/data/test_rows.py": 35,
}
"""Wall seconds of the longest files, by their paths under tests/, as a run with three workers took them.

The two cores did other work, too: only the order counts."""


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker load other rooms first, so that files that are new are compiled by one of them, not by each."""
    given, folder = getattr(config, "workerinput", None), Path(__file__).parent
    if given is None or [Path(each).resolve() for each in config.args] != [folder]:
        return
    rooms = sorted({path for path in folder.glob("*/*") if path.match("test_*.py") or any(path.rglob("test_*.py"))})
    first = int(given["workerid"].removeprefix("gw")) * len(rooms) // int(given["workercount"])
    config.args = [str(path) for path in (*rooms[first:], *rooms[:first])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left with one of them at the end.

    Tests that run in sweeps alone are left out. Files of `LONGEST` come by their seconds, then others by their number
    of tests that are slow or start ranks, and then by their paths.
    Raises `pytest.UsageError` where `LONGEST` names a file that is not there: a moved file keeps its row.
    """
    folder = Path(__file__).parent
    if gone := [name for name in LONGEST if not (folder / name).is_file()]:
        raise pytest.UsageError(f"{__file__}: LONGEST names files that are not there: {', '.join(gone)}")
    seconds = {folder / name: each for name, each in LONGEST.items()}
    slow = Counter(item.path for item in items if any(item.iter_markers("slow")) or any(item.iter_markers("processes")))
    leave_out(config, items)
    items.sort(key=lambda item: (-seconds.get(item.path, 0), -slow[item.path], item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load all modules without looking for garbage among them: it would take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through all modules again and again: what is loaded now stays.

    What tests leave behind is collected every so many objects: recordings make and drop thousands of them.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
