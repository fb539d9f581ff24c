"""`schedc checkpoint`: lists, verifies, shows and exports the checkpoints of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from schedc.cli.common import EPILOG, need
from schedc.cli.processes import run_to_end


@click.command(epilog=EPILOG)
@click.argument("word", type=click.Choice(["list", "verify", "show", "export"]))
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
@click.option(
    "--to",
    "target",
    type=click.Choice(["safetensors", "dcp", "hf"]),
    help="With export: safetensors with an index (default), torch's distributed checkpoint, or a Hugging Face model.",
)
@click.option("--config", type=click.Path(exists=True, path_type=Path), help="With --to hf: the model's config.json.")
@click.option("--shard", type=click.IntRange(1), help="With export: bytes of tensors in a file; default 4e9.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="With export: the new folder.")
def checkpoint_command(
    word: str,
    folder: Path,
    as_json: bool,
    target: str | None,
    config: Path | None,
    shard: int | None,
    output: Path | None,
) -> None:
    """List, verify, show or export the checkpoints in DIR.

    DIR is the folder of a run, or of one of its steps.

    list reads the records alone. verify reads every byte of each committed step; it names the file, the 4 MiB piece and
    the tensors of a change. show prints the tensors of a step, and which ranks hold which part. export writes the whole
    model, without the optimizer. show and export take the newest step that is whole. Only export needs torch.
    """
    if word == "export" and output is None:
        raise click.UsageError("export needs -o DIR, the folder to write")
    if word != "export" and (target or shard or output or config):
        raise click.UsageError("--to, --config, --shard and -o belong to export")
    if (target == "hf") != (config is not None):
        raise click.UsageError("--to hf and --config belong together")
    need("checkpoints need the runtime", "runtime", "schedc_runtime", *(["torch"] if word == "export" else []))
    given = {"--to": target, "--config": config, "--shard": shard, "-o": output}
    options = [str(part) for option, value in given.items() if value is not None for part in (option, value)]
    options += ["--json"] if as_json else []
    sys.exit(
        run_to_end([sys.executable, "-m", "schedc_runtime.commands.checkpoint", *options, "--", word, str(folder)])
    )
