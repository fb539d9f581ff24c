"""The runtime's processes, which `schedc run`, `calibrate` and `partition` start, and which end when these end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from signal import Signals
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import click

from schedc.interrupts import end_with, ended_by_signals, unheard

_GRACE = 1.5
"""Seconds that the runtime has to end its own processes."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables for torch's import. A rank looks for a failed peer every half second: torch would log each look."""


class Handed(NamedTuple):
    """Files for the runtime. options: those of its command line. descriptors: of files that processes inherit."""

    options: list[str]
    descriptors: list[int]


@contextmanager
def handed_over(contents: Mapping[str, bytes]) -> Iterator[Handed]:
    """Files with these contents, by option, which all processes of the runtime can open by name.

    On Linux they lie in memory and are gone with the last process, whatever ends the processes.
    """
    handed = Handed([], [])
    with ExitStack() as stack:
        for option, content in contents.items():
            if sys.platform == "linux":
                file = stack.enter_context(open(os.memfd_create("schedc"), "wb"))
                handed.descriptors.append(file.fileno())
                path = f"/proc/self/fd/{file.fileno()}"
            else:
                file = stack.enter_context(NamedTemporaryFile(prefix="schedc-"))
                path = file.name
            file.write(content)
            file.flush()
            handed.options.extend((option, path))
        yield handed


def run_to_end(command: Sequence[str], descriptors: Sequence[int] = ()) -> int:
    """Run a command, which may start further processes, and return its exit status: 128 + a signal that ended it.

    On Ctrl-C, SIGTERM and SIGHUP the command gets SIGTERM, so that no process is left when the exception goes on. When
    this process is killed, the command is killed as well. descriptors: those that the command inherits.
    """
    with ended_by_signals():
        with unheard():
            process = subprocess.Popen(
                command, env=_ENVIRONMENT | os.environ, pass_fds=descriptors, preexec_fn=partial(end_with, os.getpid())
            )
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
    return status if status >= 0 else 128 - status
