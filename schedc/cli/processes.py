"""The runtime's processes, as `schedc run` and `schedc calibrate` start them, and end them on Ctrl-C."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from signal import Signals

import click

from schedc.cli.common import FINDINGS
from schedc.interrupts import unheard

_GRACE = 10.0
"""Seconds in which the runtime has ended its own processes."""


def run_to_end(command: Sequence[str]) -> int:
    """Run a command, which itself may start more, and give its exit status: 1 where a signal ended it.

    On Ctrl-C it is asked to end (SIGTERM), so that nothing is left when `KeyboardInterrupt` goes on.
    """
    with unheard():
        process = subprocess.Popen(command)
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
