"""The runtime's processes, which `schedc run` and `schedc calibrate` start, and end on Ctrl-C."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from signal import Signals

import click

from schedc.cli.common import FINDINGS
from schedc.interrupts import unheard

_GRACE = 10.0
"""Seconds that the runtime has to end its own processes."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""What torch reads when it is loaded. A rank looks for a failed peer every half second: torch would log each look."""


def run_to_end(command: Sequence[str]) -> int:
    """Run a command, which may start further processes, and return its exit status: 1 if a signal ended it.

    On Ctrl-C the command gets SIGTERM, so that no process is left when `KeyboardInterrupt` goes on.
    """
    with unheard():
        process = subprocess.Popen(command, env=_ENVIRONMENT | os.environ)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if status < 0:
        click.echo(f"the runtime was ended by {Signals(-status).name}", err=True)
    return status if status >= 0 else FINDINGS
