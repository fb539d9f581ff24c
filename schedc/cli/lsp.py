"""`schedc lsp`: the language server that editors start."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import click

from schedc.cli.common import EPILOG, INTERRUPTED, need


@click.command(epilog=EPILOG)
def lsp_command() -> None:
    """Serve editors over stdio.

    Diagnostics, hover and formatting of .sched files. Needs schedc[lsp].
    """
    need("the language server needs pygls", "lsp", "pygls")
    from schedc.editor.server import serve

    signal.signal(signal.SIGINT, _end)
    serve()


def _end(_number: int, _frame: FrameType | None) -> None:
    """Ends the process at once, since a thread waits for stdin, which only the client can close."""
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)
