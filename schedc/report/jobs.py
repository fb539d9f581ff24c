"""Writes jobs that train by a plan: for Slurm (`sbatch`), SkyPilot and Kubeflow Trainer.

A job checks the plan, compiles it, and starts a process for each device. Ranks lie on nodes as the price has them. What
a plan does not know, such as a partition or an image, has a name in capitals: the job fails with it until it is set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedc.model.spread import RANK_ORDER
from schedc.planner.cluster.domains import placed
from schedc.planner.price.plan_lines import dense_layers
from schedc.planner.price.priced import PricedPlan
from schedc.report.plan_folder import COSTS_SUFFIX, JOB_SUFFIXES, PLAN_SUFFIX

PORT = 29500
_SHOWN = 4
"""Nodes whose first and last ranks are listed. The formula holds for all nodes."""

_SKY_NAMES = {
    "A100 SXM 40 GB": "A100", "A100 SXM 80 GB": "A100-80GB", "H100 SXM 80 GB": "H100", "H200 SXM 141 GB": "H200",
    "B200 SXM 180 GB": "B200", "GB200 186 GB": "GB200", "MI300X 192 GB": "MI300X",
}  # fmt: skip
"""By device of a shipped cluster, its name among SkyPilot's accelerators (docs.skypilot.co, `sky show-gpus`)."""

_RESOURCES = {"MI": "amd.com/gpu", "Ascend": "huawei.com/Ascend910", "": "nvidia.com/gpu"}
"""By the first letters of a device, its resource in Kubernetes: the names of the vendors' device plugins."""


@dataclass(frozen=True)
class HostMap:
    """How the ranks of a plan lie on nodes.

    nodes: that have ranks. per_node: ranks of each. domain: nodes of a domain of the innermost network; 0 where a
    domain ends inside of a node. left: further nodes of each domain, which have no rank.
    """

    nodes: int
    per_node: int
    domain: int
    left: int

    @classmethod
    def of(cls, plan: PricedPlan) -> HostMap | str:
        """The nodes of a plan, or why its ranks fill no whole nodes."""
        cluster, axes = plan.planned.problem.cluster, plan.planned.axes
        ranks, node = axes.devices, min(cluster.per_node, axes.devices)
        inside, spare = placed(cluster, axes.spare).levels[0].size, axes.spare
        if ranks % node or spare % node or (inside > node and inside % node):
            return f"{ranks:,} ranks do not fill nodes of {node} devices evenly"
        whole = inside % node == 0 and inside >= node
        return cls(ranks // node, node, min(inside, ranks) // node if whole else 0, spare // node)

    def lines(self, plan: PricedPlan) -> Iterator[str]:
        """The map as sentences, for comments."""
        axes = plan.planned.axes
        sizes = {axis: getattr(axes, axis) for axis in RANK_ORDER if getattr(axes, axis) > 1}
        each = self.per_node
        yield f"Ranks follow each other, as the price has them: node n has the ranks {each} n to {each} n + {each - 1}."
        terms = [f"{axes.stride(axis)} {axis}" if axes.stride(axis) > 1 else axis for axis in reversed(sizes)]
        yield f"A rank is {' + '.join(terms) or '0'}, by its places on the axes, which begin at 0."
        for node in range(min(self.nodes, _SHOWN)):
            first, last = (_places(rank, sizes) for rank in (node * self.per_node, (node + 1) * self.per_node - 1))
            yield f"node {node}: {first}  to  {last}"
        if 1 < self.domain < self.nodes or self.left:
            yield f"Nodes 0 to {self.domain - 1} share a domain of the network, and so do the next {self.domain}."
        if self.left:
            yield f"Each domain has {self.left} further node{'s' * (self.left > 1)}, without ranks: leave them out."


def _places(rank: int, sizes: Mapping[str, int]) -> str:
    """The places of a rank on the axes, outermost first."""
    places = []
    for axis, size in sizes.items():
        rank, place = divmod(rank, size)
        places.append(f"{axis} {place}")
    return ", ".join(reversed(places)) or "all of the model"


def job_text(kind: str, plan: PricedPlan, number: str, runs_on: Mapping[str, str | None]) -> str | None:
    """The job of a kind (`JOB_SUFFIXES`) for a plan whose file is ``number.sched``; None where there is none."""
    hosts = HostMap.of(plan)
    if no_job(plan, runs_on) is not None or isinstance(hosts, str):
        return None
    return _WRITERS[kind](plan, hosts, number)


def no_job(plan: PricedPlan, runs_on: Mapping[str, str | None]) -> str | None:
    """Why a plan has no job; None where it has one."""
    if runs_on["schedc"] is not None:
        return f"schedc does not run it: {runs_on['schedc']}"
    if (tp := plan.planned.axes.tp) > 1:
        return f"the job's trainer has no styles for tp {tp}: give `Pipeline` a `tensor_plan` in a script of your own"
    if (cp := plan.planned.axes.cp) > 1:
        return f"the job's trainer deals no tokens to cp {cp}: give them by `context_rows` in a script of your own"
    hosts = HostMap.of(plan)
    return hosts if isinstance(hosts, str) else None


def add_jobs(facts: dict[str, Any], kind: str, plans: Sequence[PricedPlan]) -> None:
    """Adds to each plan of a search's facts the file of its job, or why it has none."""
    for entry, plan in zip(facts["plans"], plans, strict=True):
        reason, number = no_job(plan, entry["runs_on"]), str(entry["file"]).removesuffix(PLAN_SUFFIX)
        entry["job"] = {"file": None if reason else number + JOB_SUFFIXES[kind], "reason": reason}


def _script(number: str, plan: PricedPlan, torchrun: str) -> Iterator[str]:
    """What each node runs, in a folder with the plan. torchrun: the launcher with where nodes meet."""
    model = plan.planned.problem.model
    dense = f" --dense {dense_layers(model)}" if model.moe else ""
    plan_file, costs = f"{number}{PLAN_SUFFIX}", f"{number}{COSTS_SUFFIX}"
    for name in ("schedc", "torchrun"):
        yield f'command -v {name} > /dev/null || {{ echo "error: no {name}: install schedc[runtime]" >&2; exit 2; }}'
    yield f'[ -f {plan_file} ] || {{ echo "error: start the job in the folder with {plan_file}" >&2; exit 2; }}'
    yield f"schedc check {plan_file} --cost-file {costs}"
    yield "program=$(mktemp -d)  # on each node"
    yield f'schedc compile {plan_file} --cost-file {costs} --format json -o "$program" > "$program/compiled.txt"'
    yield "# TRAIN is your trainer, with the same two options. Without it a small model takes three steps."
    yield f"{torchrun} ${{TRAIN:--m schedc_runtime.commands.run{dense}}} \\"
    yield f'  --program "$program/program.json" --cost-file {costs}'


def _sbatch(plan: PricedPlan, hosts: HostMap, number: str) -> str:
    name = plan.planned.problem.model.name
    torchrun = (
        f"torchrun --nnodes {hosts.nodes} --nproc-per-node {hosts.per_node}"
        f' --node-rank "$SLURM_NODEID" --master-addr "$head" --master-port {PORT}'
    )
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={name}-{number}",
        "#SBATCH --partition=SET_PARTITION",
        f"#SBATCH --nodes={hosts.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={hosts.per_node}",
        "#SBATCH --exclusive",
        *_comments(plan, hosts),
        "set -euo pipefail",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export head",
        "srun --distribution=block --kill-on-bad-exit=1 bash -euo pipefail -c '",
        *_script(number, plan, torchrun),
        "'",
    ]
    return "\n".join([*lines, ""])


def _sky(plan: PricedPlan, hosts: HostMap, number: str) -> str:
    torchrun = (
        f'torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {hosts.per_node} --node-rank "$SKYPILOT_NODE_RANK"'
        f' --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port {PORT}'
    )
    device = _SKY_NAMES.get(plan.planned.problem.cluster.device.name, "SET_ACCELERATOR")
    lines = [
        *_comments(plan, hosts),
        f"name: {json.dumps(_dns_name(plan, number))}",
        "workdir: .",
        f"num_nodes: {hosts.nodes}",
        "resources:",
        f"  accelerators: {json.dumps(f'{device}:{hosts.per_node}')}",
        "  image_id: docker:SET_IMAGE",
        "run: |",
        *(f"  {line}" for line in ("set -euo pipefail", *_script(number, plan, torchrun))),
    ]
    return "\n".join([*lines, ""])


def _trainjob(plan: PricedPlan, hosts: HostMap, number: str) -> str:
    name = plan.planned.problem.cluster.device.name
    resource = next(resource for first, resource in _RESOURCES.items() if name.startswith(first))
    script = ("set -euo pipefail", 'cd "${PLANS:?set PLANS to the folder of the plans in the image}"')
    lines = [
        *_comments(plan, hosts),
        "apiVersion: trainer.kubeflow.org/v1alpha1",
        "kind: TrainJob",
        "metadata:",
        f"  name: {json.dumps(_dns_name(plan, number))}",
        "spec:",
        "  runtimeRef:",
        "    name: torch-distributed",
        "  trainer:",
        "    image: SET_IMAGE",
        f"    numNodes: {hosts.nodes}",
        f"    numProcPerNode: {hosts.per_node}",
        "    resourcesPerNode:",
        "      limits:",
        f"        {resource}: {hosts.per_node}",
        "    env:",
        "      - name: PLANS",
        '        value: ""',
        "    command:",
        "      - bash",
        "      - -c",
        "      - |",
        *(f"        {line}" for line in (*script, *_script(number, plan, "torchrun"))),
    ]
    return "\n".join([*lines, ""])


_WRITERS: dict[str, Callable[[PricedPlan, HostMap, str], str]] = dict(
    zip(JOB_SUFFIXES, (_sbatch, _sky, _trainjob), strict=True)
)


def _comments(plan: PricedPlan, hosts: HostMap) -> Iterator[str]:
    return (f"# {line}" for line in hosts.lines(plan))


def _dns_name(plan: PricedPlan, number: str) -> str:
    """A name of small letters, digits and dashes, which begins with a letter."""
    letters = "".join(letter if letter.isalnum() else "-" for letter in plan.planned.problem.model.name.lower())
    return f"train-{letters[:40].strip('-')}-{number}"
