"""``schedc doctor``: whether the processes of a job fit together, in one line for each question.

Alone it tells versions and the program. Under torchrun all ranks join, compare what they have, and measure their links.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import schedc
from schedc.diagnostics import DiagnosticError, clean
from schedc.ir.load import load_program
from schedc.ir.program import Program
from schedc_runtime.audit.fitness import device_facts
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.agree.agreement import program_digest
from schedc_runtime.pipeline.build.apply_plan import mesh_for
from schedc_runtime.ranks.join import join

SMALL, LARGE = 8, 4_000_000
"""Bytes of a message whose time is the latency, and of one whose time is the speed."""
REPEATS = 5
SLOW = 0.5
"""A link is slow below this share of the median speed of its kind."""


class NeededMesh(NamedTuple):
    """What a program and its plan need of a job.

    ranks: of the pipeline. peers: processes of each, at least. exact: whether further ones would be no replicas, as the
    plan says all. node: ranks that a node is to have, or a multiple; 1 where no plan says it. says: the axes, in words.
    """

    ranks: int
    peers: int = 1
    exact: bool = False
    node: int = 1
    says: str = ""

    @classmethod
    def of(cls, program: Program) -> NeededMesh:
        """Raises `RuntimeFault` for a plan that no mesh serves."""
        plan, mesh = program.plan, mesh_for(program.plan, program, None)
        peers, parallel = mesh.size // mesh.pipeline, plan.parallel
        if parallel is None:
            says = f"{peers} expert ranks" if peers > 1 else ""
            return cls(program.ranks, peers, node=mesh.per_node or 1, says=says)
        axes = {"tp": parallel.tp, "cp": parallel.cp, "ep": parallel.ep, "dp": parallel.dp}
        says = f"{peers} processes: {', '.join(f'{axis} {size}' for axis, size in axes.items())}"
        return cls(program.ranks, peers, True, min(parallel.node, mesh.size) or mesh.per_node or 1, says)


class RankFacts(NamedTuple):
    """What a rank says of itself. program: digest, empty without a program. needs: of the program."""

    host: str
    local: int
    versions: Mapping[str, str]
    device: str
    program: str
    needs: NeededMesh | None


class MeasuredLink(NamedTuple):
    """Messages from a rank to the next one: seconds of a small one, and bytes per second of a large one."""

    rank: int
    latency: float
    speed: float


class DoctorCheck(NamedTuple):
    """The answer to a question. right: whether the job can run so. says: one line."""

    what: str
    right: bool
    says: str


def facts_here(path: Path | None, device: torch.device) -> RankFacts:
    """The facts of this process. path: a file of a program."""
    program = None if path is None else load_program(path.read_bytes(), str(path))
    versions = {"schedc": schedc.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    return RankFacts(
        socket.gethostname(),
        int(os.environ.get("LOCAL_RANK", "0")),
        versions,
        device_facts(device)["device"],
        "" if program is None else program_digest(program)[:16],
        None if program is None else NeededMesh.of(program),
    )


def checks(facts: Sequence[RankFacts], links: Sequence[MeasuredLink]) -> Iterator[DoctorCheck]:
    """The answers for all ranks."""
    yield _versions(facts)
    yield _alike("device", [each.device for each in facts])
    if any(each.program for each in facts):
        yield _alike("program", [each.program or "no program" for each in facts])
    needs = next((each.needs for each in facts if each.needs), None)
    if needs:
        yield _mesh(len(facts), needs)
    if len(facts) > 1:
        yield _order([each.host for each in facts], needs.node if needs else 1)
        yield _links([each.host for each in facts], links)


def _versions(facts: Sequence[RankFacts]) -> DoctorCheck:
    names = facts[0].versions
    each = [_alike(name, [rank.versions[name] for rank in facts]) for name in names]
    return DoctorCheck("versions", all(one.right for one in each), ", ".join(f"{one.what} {one.says}" for one in each))


def _alike(what: str, values: Sequence[str]) -> DoctorCheck:
    """Whether all ranks have one value; else who has another one than most."""
    most = Counter(values).most_common(1)[0][0]
    others = [f"rank {rank} has {value}" for rank, value in enumerate(values) if value != most]
    return DoctorCheck(what, not others, f"{most}{' but ' if others else ''}{', '.join(others)}")


def _mesh(world: int, needs: NeededMesh) -> DoctorCheck:
    """Whether the processes are those of the program and its plan."""
    pipeline, least = (
        f"{needs.ranks} pipeline ranks{f' x {needs.says}' if needs.says else ''}",
        needs.ranks * needs.peers,
    )
    replicas, left = divmod(world, least)
    if world == 1 < least:
        return DoctorCheck("mesh", True, f"the program has {pipeline}; start {least} by torchrun")
    if left or (needs.exact and replicas > 1):
        wanted = f"{least}" if needs.exact else f"a multiple of {least}"
        return DoctorCheck("mesh", False, f"{world} processes; {pipeline} take {wanted}")
    return DoctorCheck("mesh", True, pipeline if needs.exact else f"{pipeline} x {replicas} replicas")


def _order(hosts: Sequence[str], node: int) -> DoctorCheck:
    """Whether the ranks of a node follow each other, so that most messages stay inside of nodes, and fill the plan's.

    node: ranks of a node of the plan.
    """
    crossing = sum(a != b for a, b in pairwise(hosts))
    nodes = dict.fromkeys(hosts)
    counts = sorted(Counter(hosts).values())
    if crossing != len(nodes) - 1:
        pairs = [str(rank) for rank, pair in enumerate(pairwise(hosts)) if pair[0] != pair[1]]
        says = f"ranks of {len(nodes)} nodes alternate: the next rank lies elsewhere for rank {', '.join(pairs)}"
        return DoctorCheck("order", False, says)
    if counts[0] != counts[-1]:
        return DoctorCheck("order", False, f"nodes have {counts[0]} to {counts[-1]} ranks")
    if counts[0] % node:
        return DoctorCheck("order", False, f"nodes have {counts[0]} ranks, and the plan is for {node} in each")
    return DoctorCheck(
        "order", True, f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} of {counts[0]} ranks in a row"
    )


def _links(hosts: Sequence[str], links: Sequence[MeasuredLink]) -> DoctorCheck:
    """The speed of each kind of link, and who is much slower than its kind."""
    told, slow = [], []
    for kind, inside in (("inside nodes", True), ("between nodes", False)):
        own = [link for link in links if (hosts[link.rank] == hosts[link.rank + 1]) == inside]
        if own:
            speed, latency = median(link.speed for link in own), median(link.latency for link in own)
            told.append(f"{speed / 1e9:.3g} GB/s, {latency * 1e6:.0f} us {kind}")
            slow += [f"{link.rank} to {link.rank + 1} has {link.speed / 1e9:.3g} GB/s" for link in own
                     if link.speed < SLOW * speed]  # fmt: skip
    return DoctorCheck("links", not slow, "; ".join([*told, *slow]))


def measured_links(device: torch.device) -> list[MeasuredLink]:
    """The links of neighbouring ranks, one after the other, so that none disturbs another. Every rank calls this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    links = [MeasuredLink(first, *(_seconds(rank - first, first, size, device) for size in (SMALL, LARGE)))
             for first in range(world - 1)]  # fmt: skip
    own = [link for link in links if link.rank == rank]
    told: list[Any] = [None] * world
    dist.all_gather_object(told, own)
    return [link._replace(speed=LARGE / link.speed) for each in told for link in each]


def _seconds(place: int, first: int, size: int, device: torch.device) -> float:
    """Seconds of a message from a rank to the next one: half of the shortest way there and back. place: 0 or 1."""
    dist.barrier()
    if place not in (0, 1):
        return 0.0
    buffer, times = torch.zeros(size, dtype=torch.uint8, device=device), []
    for _ in range(REPEATS + 1):
        start = perf_counter()
        for sender in (0, 1):
            (dist.send if place == sender else dist.recv)(buffer, first + 1 - place)
        device_for(device).current().synchronize()
        times.append(perf_counter() - start)
    return min(times[1:]) / 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answers, under torchrun on rank 0; return the exit status: 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="schedc doctor")
    parser.add_argument("program", type=Path, nargs="?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        device = join()
        own: RankFacts | str = facts_here(options.program, device)
    except (RuntimeFault, DiagnosticError, OSError) as error:
        own = " ".join(line.strip() for line in str(error).splitlines()[:2])  # the fault, and its place or help
    everyone: list[Any] = [own]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    faults = [f"rank {rank}: {each}" for rank, each in enumerate(everyone) if isinstance(each, str)]
    links = measured_links(device) if dist.is_initialized() and not faults else []
    answers = [DoctorCheck("program", False, "; ".join(faults))] if faults else [*checks(everyone, links)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        _tell(answers, links, options.json)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(not all(each.right for each in answers))


def _tell(answers: Sequence[DoctorCheck], links: Sequence[MeasuredLink], as_json: bool) -> None:
    if as_json:
        facts = {"checks": [each._asdict() for each in answers], "links": [each._asdict() for each in links]}
        print(json.dumps({"schema": "schedc.doctor", "version": 1, **facts}))
        return
    for each in answers:
        print(clean(f"{'ok   ' if each.right else 'WRONG'}  {each.what}: {each.says}"))


if __name__ == "__main__":
    sys.exit(main())
