"""`schedc lsp`: the language server that editors start."""

from __future__ import annotations

import click

from schedc.cli.common import EPILOG


@click.command(epilog=EPILOG)
def lsp() -> None:
    """Serve editors over stdio: diagnostics, hover and formatting of .sched files (needs schedc[lsp])."""
    from importlib.util import find_spec

    if find_spec("pygls") is None:
        raise click.UsageError("the language server needs pygls: pip install 'schedc[lsp]'")
    from schedc.lsp.server import serve

    serve()
