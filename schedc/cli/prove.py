"""`schedc prove`: repeats the evidence of an audit on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from schedc.cli.common import EPILOG, need
from schedc.cli.processes import run_to_end


@click.command(epilog=f"{EPILOG} Besides, 3: this machine agrees with another rank than the suspect.")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", required=True, metavar="MODULE:FUNCTION", help="Gives (model, loss_fn, batch, targets).")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch; by default as many as in the run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
def prove_command(folder: Path, model: str, threads: int | None, as_json: bool) -> None:
    """Repeat the microbatch of an audit, and compare its bits.

    DIR is what the audit has written: the bits of each rank are in it.

    Status 0: this machine agrees with the suspect. 3: it agrees with another rank. 1: it agrees with nobody, or DIR
    holds no evidence. The model has the sizes of the run; its weights come from DIR.
    """
    need("proofs need the runtime", "runtime", "schedc_runtime", "torch")
    options = ["--model", model, *(["--threads", str(threads)] if threads else []), *(["--json"] if as_json else [])]
    sys.exit(run_to_end([sys.executable, "-m", "schedc_runtime.commands.prove", *options, "--", str(folder)]))
