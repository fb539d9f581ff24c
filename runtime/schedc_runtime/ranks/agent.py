"""Finds the process that starts the ranks of this machine again: torchrun's agent, or that of `schedc torchrun`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.processes import Process, process_here, unshared_bytes

AGENT, SPARE = "SCHEDC_AGENT", "SCHEDC_SPARE"
"""Variables of the environment with process ids: the agent's, where ranks are forked from a spare, and the spare's."""


def agent_here() -> Process | None:
    """The process that starts dead ranks again; None without such a launcher."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    return process_here(int(os.environ[AGENT]) if spare_here() else os.getppid())


def spare_here() -> Process | None:
    """The spare process that this one was forked from; None for a process that loaded torch itself."""
    parent = os.getppid()
    return process_here(parent) if os.environ.get(SPARE) == str(parent) else None


def check_spares(count: int) -> None:
    """Raise `RuntimeFault` for a number of spares that this machine does not have."""
    if count not in (0, 1):
        raise RuntimeFault(f"spares={count}", "give 1: any number of ranks are forked from one spare of a machine")
    if count and spare_here() is None:
        raise RuntimeFault(
            "spares=1, and no spare has started this process",
            "start the job with `schedc torchrun` in place of torchrun",
        )


def told_spare() -> Iterator[str]:
    """A line with the cost of the spare that has started this process."""
    if (spare := spare_here()) is not None:
        size = unshared_bytes(spare.pid) / 1e6
        yield f"  the spare (pid {spare.pid}) has torch loaded for the next attempt, and takes {size:.0f} MB of its own"
