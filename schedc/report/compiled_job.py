"""The job that trains by a compiled program, beside its files."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.ir.plan import Plan
from schedc.ir.program import Program
from schedc.report.job_files import ClusterJob, needs_file, needs_programs, write_job

FILE = "job"
"""How the file of a job begins; `JOB_SUFFIXES` says how it ends."""
DEVICES = 8
"""Devices of a node where no plan says them."""


@dataclass(frozen=True)
class ProgramHosts:
    """Processes of a program on nodes. peers: processes of each pipeline rank."""

    ranks: int
    peers: int
    per_node: int

    @classmethod
    def of(cls, program: Program, plan: Plan, replicas: int) -> ProgramHosts | str:
        """The processes of a program, or why they fill no whole nodes. replicas: that the command line asks for."""
        peers, node = _peers(plan, replicas)
        world = program.ranks * peers
        per_node = min(node or DEVICES, world)
        if world % per_node:
            return f"{world} ranks do not fill nodes of {per_node} devices evenly"
        return cls(program.ranks, peers, per_node)

    def comment(self) -> str:
        """The ranks of a node."""
        last = f"{self.per_node} n + {self.per_node - 1}"
        node = f"Ranks follow each other: node n has the ranks {self.per_node} n to {last}."
        return f"{node} A rank is {self.peers} x its pipeline rank + its peer." if self.peers > 1 else node


def compiled_job(kind: str, name: str, hosts: ProgramHosts, file: str) -> str:
    """The text of a job. name: of the schedule. file: of the program, in the folder of the job."""

    def script(torchrun: str) -> tuple[str, ...]:
        return (
            *needs_programs("schedc", "torchrun"),
            needs_file(file),
            f"{torchrun} -m schedc doctor {file}",
            f"{torchrun} ${{TRAIN:?set TRAIN to your trainer}} --program {file}",
        )

    nodes = hosts.ranks * hosts.peers // hosts.per_node
    return write_job(kind, ClusterJob(name, nodes, hosts.per_node, (hosts.comment(),), "", "PROGRAM", script))


def _peers(plan: Plan, replicas: int) -> tuple[int, int]:
    """The processes of each pipeline rank, and the devices of a node, 0 where the plan does not say them."""
    if plan.parallel is not None:
        return plan.parallel.per_rank, plan.parallel.node
    if plan.topology is not None:
        return max(plan.topology.ranks, replicas), plan.topology.per_node
    return replicas, 0
