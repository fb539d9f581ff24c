"""The small models that commands train and measure: a GPT, or a transformer with experts like that of DeepSeek-V3."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.ir.program import Program
from schedc.layout.parts import Kind
from schedc.plan import ExpertPlan, Experts, Topology
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.launch import launched
from schedc_runtime.mesh import Mesh
from schedc_runtime.moe.router import Routing
from schedc_runtime.moe.transformer import MoEConfig, MoETransformer
from schedc_runtime.placing import layout_of
from schedc_runtime.planned import mesh_for
from schedc_runtime.stage import LossFunction

VOCAB = 64
FEW_EXPERTS = Experts(16, 2, shared=1)
"""Those of a toy whose plan has none."""


class Subject(NamedTuple):
    """What is trained or measured. batch, targets: of one microbatch on one rank; a tuple is the positional arguments
    of the model's forward, a dict its keywords."""

    model: nn.Module
    loss_fn: LossFunction
    batch: Any
    targets: Any


def toy(kind: str, program: Program, plan: ExpertPlan, options: argparse.Namespace) -> Subject:
    """The model ``kind`` (``gpt`` or ``moe``), with the layers and experts of the plan where it says them.

    options: those of `add_sizes`. The same model on every process.
    """
    torch.manual_seed(options.seed)
    layout = layout_of(program)
    blocks = layout.layers + layout.total(Kind.MTP) if layout else program.stages
    blocks = options.blocks or blocks
    if kind == "gpt":
        model: nn.Module = GPT(GPTConfig(VOCAB, options.width, blocks=blocks, context=options.tokens))
    else:
        dense = min(options.dense, blocks)
        model = MoETransformer(_moe(dense, blocks, options.width, plan.experts or FEW_EXPERTS))
    return Subject(model, next_token_loss, *counted(options.rows, options.tokens, options.seed))


def counted(rows: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """[rows, tokens] of random tokens, and of each a target that follows from it."""
    batch = torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return batch, (5 * batch + 3) % VOCAB


def _moe(dense: int, blocks: int, width: int, experts: Experts) -> MoEConfig:
    head = max(4, width // 4)
    routing = Routing(
        experts.count, experts.top, scores="sigmoid", scale=2.5, groups=experts.groups,
        kept_groups=experts.limit if experts.groups > 1 else 1, biased=True, bias_rate=0.01, balance=1e-4,
    )  # fmt: skip
    return MoEConfig(
        vocab=VOCAB, width=width, heads=4, dense_blocks=dense, moe_blocks=blocks - dense, inner=2 * width,
        expert_inner=head, shared=experts.shared, routing=routing, query_rank=max(4, width // 2), key_value_rank=head,
        plain=head, rotary=max(2, head // 2 // 2 * 2), value=head,
    )  # fmt: skip


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options that `toy` and `asked` read."""
    parser.add_argument("--blocks", type=positive, help="layers (default: those of the plan, else one per stage)")
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
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _topology(text: str) -> tuple[int, int]:
    nodes, x, per_node = text.partition("x")
    if not x or not nodes.isdecimal() or not per_node.isdecimal() or not int(nodes) * int(per_node):
        raise argparse.ArgumentTypeError(f"{text!r} is not NODESxRANKS, as 2x4")
    return int(nodes), int(per_node)


def asked(plan: ExpertPlan, options: argparse.Namespace) -> ExpertPlan:
    """The plan with the topology of the options, if they say one; its speeds stay."""
    if options.topology is None:
        return plan
    nodes, per_node = options.topology
    known = plan.topology or Topology(nodes, per_node)
    return replace(plan, topology=replace(known, nodes=nodes, per_node=per_node))


def mesh_here(plan: ExpertPlan, program: Program) -> Mesh:
    """The mesh of a run: as the plan's topology says, else as a launcher's processes allow; what is left of those are
    further replicas. Not launched, it says how many processes to start."""
    mesh = mesh_for(plan, program, None)
    world = int(os.environ["WORLD_SIZE"]) if launched() else mesh.size
    if plan.topology is None and plan.experts is not None:
        return Mesh.of_environment(program.ranks, world // program.ranks) if world > mesh.size else mesh
    return replace(mesh, data=max(1, world // mesh.size))


def check_processes(count: int) -> None:
    """Refuse more local processes than this machine can reasonably hold."""
    if count > (most := max(64, 4 * (os.cpu_count() or 1))):
        raise RuntimeFault(
            f"the schedule and the plan's topology ask for {count} processes, more than {most} on this machine",
            "give smaller sizes: -D P=2 for the schedule, --topology 1x2 for the ranks that share experts",
        )


def join(in_process: bool) -> torch.device:
    """Join the other ranks; the device of this one: a GPU each where there are enough, else the CPU."""
    if in_process or not launched():
        torch.set_num_threads(1)
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    return device
