"""Writes jobs for clusters: a script for Slurm, a task for SkyPilot, and a TrainJob for Kubeflow Trainer.

What a program does not know, such as a partition or an image, has a name in capitals: the job fails with it until it
is set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

PORT = 29500

JOB_SUFFIXES = {"slurm": ".sbatch", "skypilot": ".sky.yaml", "kubeflow": ".trainjob.yaml"}
"""By kind of job, how its file ends."""

_SKY_NAMES = {
    "A100 SXM 40 GB": "A100", "A100 SXM 80 GB": "A100-80GB", "H100 SXM 80 GB": "H100", "H200 SXM 141 GB": "H200",
    "B200 SXM 180 GB": "B200", "GB200 186 GB": "GB200", "MI300X 192 GB": "MI300X",
}  # fmt: skip
"""By device of a shipped cluster, its name among SkyPilot's accelerators (docs.skypilot.co, `sky show-gpus`)."""

_RESOURCES = {"MI": "amd.com/gpu", "Ascend": "huawei.com/Ascend910", "": "nvidia.com/gpu"}
"""By the first letters of a device, its resource in Kubernetes: the names of the vendors' device plugins."""


@dataclass(frozen=True)
class ClusterJob:
    """A job that starts a process for each device.

    name: of what is trained, with a number. comments: how ranks lie on nodes. device: of a shipped cluster; empty where
    it is not known. folder: variable of a TrainJob that names the folder with the files. script: lines that each node
    runs there, for a launcher.
    """

    name: str
    nodes: int
    per_node: int
    comments: tuple[str, ...]
    device: str
    folder: str
    script: Callable[[str], tuple[str, ...]]

    @property
    def dns_name(self) -> str:
        """A name of small letters of ASCII, digits and dashes, which begins with a letter."""
        letters = re.sub("[^a-z0-9]+", "-", self.name.lower())
        return f"train-{letters[-48:]}".strip("-")


def write_job(kind: str, job: ClusterJob) -> str:
    """The text of a job. kind: one of `JOB_SUFFIXES`."""
    lines = {"slurm": _slurm, "skypilot": _skypilot, "kubeflow": _kubeflow}[kind](job)
    return "\n".join([*lines, ""])


def needs_programs(*names: str) -> tuple[str, ...]:
    """Lines that end a script where a program is missing."""
    return tuple(
        f'command -v {name} > /dev/null || {{ echo "error: no {name}: install schedc[runtime]" >&2; exit 2; }}'
        for name in names
    )


def needs_file(name: str) -> str:
    """A line that ends a script in another folder than that of a file."""
    return f'[ -f {name} ] || {{ echo "error: start the job in the folder with {name}" >&2; exit 2; }}'


def _comments(job: ClusterJob) -> list[str]:
    return [f"# {line}" for line in job.comments]


def _slurm(job: ClusterJob) -> list[str]:
    torchrun = (
        f"torchrun --nnodes {job.nodes} --nproc-per-node {job.per_node}"
        f' --node-rank "$SLURM_NODEID" --master-addr "$head" --master-port {PORT}'
    )
    return [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={job.dns_name}",
        "#SBATCH --partition=SET_PARTITION",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={job.per_node}",
        "#SBATCH --exclusive",
        *_comments(job),
        "set -euo pipefail",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export head",
        "srun --distribution=block --kill-on-bad-exit=1 bash -euo pipefail -c '",
        *job.script(torchrun),
        "'",
    ]


def _skypilot(job: ClusterJob) -> list[str]:
    torchrun = (
        f'torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {job.per_node} --node-rank "$SKYPILOT_NODE_RANK"'
        f' --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port {PORT}'
    )
    device = _SKY_NAMES.get(job.device, "SET_ACCELERATOR")
    return [
        *_comments(job),
        f"name: {json.dumps(job.dns_name)}",
        "workdir: .",
        f"num_nodes: {job.nodes}",
        "resources:",
        f"  accelerators: {json.dumps(f'{device}:{job.per_node}')}",
        "  image_id: docker:SET_IMAGE",
        "run: |",
        *(f"  {line}" for line in ("set -euo pipefail", *job.script(torchrun))),
    ]


def _kubeflow(job: ClusterJob) -> list[str]:
    resource = next(resource for first, resource in _RESOURCES.items() if job.device.startswith(first))
    what = job.folder.lower()
    script = ("set -euo pipefail", f'cd "${{{job.folder}:?set {job.folder} to the folder of the {what} in the image}}"')
    return [
        *_comments(job),
        "apiVersion: trainer.kubeflow.org/v1alpha1",
        "kind: TrainJob",
        "metadata:",
        f"  name: {json.dumps(job.dns_name)}",
        "spec:",
        "  runtimeRef:",
        "    name: torch-distributed",
        "  trainer:",
        "    image: SET_IMAGE",
        f"    numNodes: {job.nodes}",
        f"    numProcPerNode: {job.per_node}",
        "    resourcesPerNode:",
        "      limits:",
        f"        {resource}: {job.per_node}",
        "    env:",
        f"      - name: {job.folder}",
        '        value: ""',
        "    command:",
        "      - bash",
        "      - -c",
        "      - |",
        *(f"        {line}" for line in (*script, *job.script("torchrun"))),
    ]
