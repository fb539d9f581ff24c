"""The option --job of `plan` and `compile`: which kind of job is written beside plans and programs."""

from __future__ import annotations

import click

KINDS = ("slurm", "skypilot", "kubeflow")
OLD_KINDS = {"sbatch": "slurm", "sky": "skypilot", "trainjob": "kubeflow"}
"""Spellings that --jobs of `plan` took; they go with the next minor version."""


def old_kind(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """The kind of job by the old spelling, with a note."""
    if value is None:
        return None
    kind = OLD_KINDS[value]
    click.echo(f"note: `--jobs {value}` is now `--job {kind}`", err=True)
    return kind
