"""`schedc torchrun`: torchrun, whose ranks are forked from a process that has loaded torch."""

from __future__ import annotations

import os
import sys

import click

from schedc.cli.common import EPILOG, need_runtime


@click.command(
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def torchrun_command(arguments: tuple[str, ...]) -> None:
    """Be torchrun with ranks that start again sooner.

    Ranks are forked from a process that has loaded torch. Needs schedc[runtime].

    ARGUMENTS go to torchrun; `torchrun --help` lists them. Ranks that are started again need not import torch.
    """
    need_runtime("starting ranks")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "schedc_runtime.commands.torchrun", *arguments])
