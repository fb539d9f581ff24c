"""Kinds of jobs that `plan` and `compile` write beside plans and programs."""

from __future__ import annotations

KINDS = ("slurm", "skypilot", "kubeflow")
OLD_KINDS = {"sbatch": "slurm", "sky": "skypilot", "trainjob": "kubeflow"}
"""Spellings that --jobs of `plan` took."""
