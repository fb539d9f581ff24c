"""Runs the script of a job on this machine, with the programs of a cluster replaced: torchrun says its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.paths import ROOT

_PROGRAMS = {
    "scontrol": "echo 127.0.0.1",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_NODEID=0 "$@"',
    "schedc": f'exec "{sys.executable}" -m schedc "$@"',
    "torchrun": 'printf "%s\\n" "$@" > "${0%/*}/torchrun.arguments"',
}


def launch_line(script: Path, folder: Path, environment: Mapping[str, str] | None = None) -> list[str]:
    """The arguments with which a script of bash starts torchrun, once in the end. Fails where the script fails."""
    programs = folder.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths, "SLURM_JOB_NODELIST": "n"}
    run = subprocess.run(
        ["bash", str(script)], cwd=folder, env={**os.environ, **own, **(environment or {})},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return (programs / "torchrun.arguments").read_text().splitlines()


def scripts_of(job: Mapping[str, object]) -> str:
    """The script inside a job of SkyPilot or Kubeflow Trainer."""
    if "run" in job:
        return str(job["run"])
    trainer = json.loads(json.dumps(job))["spec"]["trainer"]
    assert trainer["command"][:2] == ["bash", "-c"]
    return str(trainer["command"][2])
