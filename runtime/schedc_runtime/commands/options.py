"""What the commands that run a program share: common options, joining the other ranks, reporting failures."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from schedc.diagnostics import DiagnosticError
from schedc.ir.load import load_program
from schedc.ir.program import Program
from schedc.plan import Plan, Topology
from schedc_runtime.commands.launch import launched
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.build.apply_plan import mesh_for
from schedc_runtime.ranks.join import join as join_launched
from schedc_runtime.ranks.mesh import Mesh


class Content(NamedTuple):
    """The content and the name of a file that an option names."""

    content: bytes
    file: str


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the option that `program_of_options` reads."""
    parser.add_argument("--program", required=True, type=_readable, help="program.json, .npz or .txt of schedc compile")


def program_of_options(options: argparse.Namespace) -> Program:
    """The program that a command was given. Raises `DiagnosticError` for a program that could not run."""
    return load_program(*options.program)


def report_failure(error: Exception) -> int:
    """Print on stderr what the user has to mend, once for all ranks of `launch`; return the status of a failure."""
    text = str(error) if isinstance(error, DiagnosticError) else f"error: {error}"
    if _is_first(text):
        print(text, file=sys.stderr, flush=True)
    return 1


def _is_first(text: str) -> bool:
    """Whether no other rank of `launch` has said the same. torchrun keeps a log for each rank: there all say it."""
    if not dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    said = f"schedc/said/{blake2b(text.encode(), digest_size=16).hexdigest()}"
    try:
        return dist.distributed_c10d._get_default_store().add(said, 1) == 1
    except RuntimeError:  # the store has gone
        return True


def _readable(path: str) -> Content:
    """The file at ``path``; wrong usage if it cannot be read."""
    try:
        return Content(Path(path).read_bytes(), path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read the program: {error}") from error


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options that `schedc_runtime.commands.toy_models.toy_model` and `with_overrides` read."""
    parser.add_argument("--blocks", type=positive, help="layers (default: as many as in the plan, else one per stage)")
    parser.add_argument("--dense", type=int, default=0, help="how many of the first layers have no experts")
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--tokens", type=positive, default=32, help="per row")
    parser.add_argument("--rows", type=positive, default=2, help="per microbatch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a rank waits for another")
    parser.add_argument(
        "--topology", type=_topology, metavar="NxG", help="nodes x ranks that share experts, in place of the plan's"
    )


def positive(text: str) -> int:
    """An option's value as a positive number."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _topology(text: str) -> tuple[int, int]:
    nodes, x, per_node = text.partition("x")
    if not x or not nodes.isdecimal() or not per_node.isdecimal() or not int(nodes) * int(per_node):
        raise argparse.ArgumentTypeError(f"{text!r} is not NODESxRANKS, as 2x4")
    return int(nodes), int(per_node)


def with_overrides(plan: Plan, options: argparse.Namespace) -> Plan:
    """The plan with the topology that the options give, if they do; the speeds of its links stay.

    A plan that spreads a step over more devices then has one expert group.
    """
    if options.topology is None:
        return plan
    nodes, per_node = options.topology
    topology = plan.topology or Topology(nodes, per_node)
    parallel, ranks = plan.parallel, nodes * per_node
    if parallel is not None:
        parallel = replace(parallel, ep=ranks, dp=ranks, devices=0, node=0)
    return replace(plan, topology=replace(topology, nodes=nodes, per_node=per_node), parallel=parallel)


def mesh_here(plan: Plan, program: Program) -> Mesh:
    """The mesh of a run: as the plan's topology says, else as many expert ranks as the launcher's processes allow.

    Further processes are further replicas. Without a launcher the mesh says how many processes to start.
    """
    mesh = mesh_for(plan, program, None)
    world = int(os.environ["WORLD_SIZE"]) if launched() else mesh.size
    if plan.parallel is not None:
        if world != mesh.size:
            message = f"{world} processes, and the plan's `parallel` line is for {mesh.size}"
            raise RuntimeFault(message, f"start {mesh.size}, or change `dp`")
        return mesh
    if plan.topology is None and plan.experts is not None:
        return Mesh.of_environment(program.ranks, world // program.ranks) if world > mesh.size else mesh
    return replace(mesh, data=max(1, world // mesh.size))


def check_processes(count: int) -> None:
    """Raise `RuntimeFault` for more local processes than this machine can reasonably hold."""
    if count > (most := max(64, 4 * (os.cpu_count() or 1))):
        raise RuntimeFault(
            f"the schedule and the plan's topology ask for {count} processes, more than {most} on this machine",
            "give smaller sizes: -D P=2 for the schedule, --topology 1x2 for the ranks that share experts",
        )


def join_options(in_process: bool) -> torch.device:
    """Join the other ranks. Returns this rank's device: a GPU each where there are enough, else the CPU."""
    if in_process or not launched():
        torch.set_num_threads(1)
        return torch.device("cpu")
    return join_launched()
