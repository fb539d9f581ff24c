"""Makes the job that trains by a plan: it checks the plan, compiles it, and starts a process for each device.

Ranks lie on nodes as in the predicted step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from schedc.model.spread import RANK_ORDER
from schedc.planner.cluster.domains import placed
from schedc.planner.price.plan_lines import dense_layers
from schedc.planner.price.priced import PricedPlan
from schedc.report.job_files import JOB_SUFFIXES, ClusterJob, needs_file, needs_programs, write_job
from schedc.report.plan_folder import COSTS_SUFFIX, PLAN_SUFFIX

_SHOWN = 4
"""Nodes whose first and last ranks are listed. The formula holds for all nodes."""


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
        yield f"Ranks follow each other, as predicted: node n has the ranks {each} n to {each} n + {each - 1}."
        terms = [f"{axes.stride(axis)} {axis}" if axes.stride(axis) > 1 else axis for axis in reversed(sizes)]
        yield f"A rank is {' + '.join(terms) or '0'}, by its places on the axes, which begin at 0."
        for node in range(min(self.nodes, _SHOWN)):
            first, last = (_places(rank, sizes) for rank in (node * self.per_node, (node + 1) * self.per_node - 1))
            yield f"node {node}: {first}  to  {last}"
        if self.nodes > _SHOWN:
            yield f"nodes {_SHOWN} to {self.nodes - 1}: by the same formula"
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
    model, device = plan.planned.problem.model, plan.planned.problem.cluster.device.name
    comments, name = tuple(hosts.lines(plan)), f"{model.name}-{number}"
    job = ClusterJob(name, hosts.nodes, hosts.per_node, comments, device, "PLANS", partial(_script, number, plan))
    return write_job(kind, job)


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


def _script(number: str, plan: PricedPlan, torchrun: str) -> tuple[str, ...]:
    """What each node runs, in a folder with the plan. torchrun: the launcher with where nodes meet."""
    model = plan.planned.problem.model
    dense = f" --dense {dense_layers(model)}" if model.moe else ""
    plan_file, costs = f"{number}{PLAN_SUFFIX}", f"{number}{COSTS_SUFFIX}"
    return (
        *needs_programs("schedc", "torchrun"),
        needs_file(plan_file),
        f"schedc check {plan_file} --cost-file {costs}",
        "program=$(mktemp -d)  # on each node",
        f'schedc compile {plan_file} --cost-file {costs} --format json -o "$program" > "$program/compiled.txt"',
        "# TRAIN is your trainer, with the same two options. Without it a small model takes three steps.",
        f"{torchrun} ${{TRAIN:--m schedc_runtime.commands.run{dense}}} \\",
        f'  --program "$program/program.json" --cost-file {costs}',
    )
