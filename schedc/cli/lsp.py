"""`schedc lsp`: the language server that editors start."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import click

from schedc.cli.common import EPILOG, INTERRUPTED


@click.command(epilog=EPILOG)
def lsp_command() -> None:
    """Serve editors over stdio: diagnostics, hover and formatting of .sched files (needs schedc[lsp])."""
    from importlib.util import find_spec

    if find_spec("pygls") is None:
        raise click.UsageError("the language server needs pygls: pip install 'schedc[lsp]'")
    from schedc.editor.server import serve

    signal.signal(signal.SIGINT, _end)
    serve()


def _end(_number: int, _frame: FrameType | None) -> None:
    """Ends the process at once, since a thread waits for stdin, which only the client can close."""
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)
