"""Carries out a plan on the stages of one process: mesh, experts, exchanges, recomputation, offloads, fused chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from schedc.cell import CellCosts
from schedc.diagnostics import DiagnosticError
from schedc.ir.parallel import Parallel
from schedc.ir.plan import Fuse, Products
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.recomputed import recomputed_slots
from schedc.ir.scopes import is_chosen, line_per_stage
from schedc.ir.verify_plan import verify_plan
from schedc.ir.works import WorkKind
from schedc.model.fusions import COMPILED, FUSIONS
from schedc.plan import Method, Plan, Topology
from schedc.step.costs import exchange
from schedc.step.dependencies import Dependencies
from schedc.step.program.insert_works import placed_in
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.capacity import ExpertCapacity
from schedc_runtime.moe.counts import METHODS
from schedc_runtime.moe.even_rows import EvenRows
from schedc_runtime.moe.hot_choice import HotPolicy
from schedc_runtime.moe.kernels import Kernels, MeasuredProducts
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.load_history import LoadHistory
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.pipeline.build.stages import StagesByIndex
from schedc_runtime.providers import NOBODY_NAMED, TORCH, NamedProviders
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.collective_calls import Communicator

if TYPE_CHECKING:
    from schedc_runtime.compiled.settings import CompileSettings
    from schedc_runtime.fusion.fused_stages import FusedStages
    from schedc_runtime.fusion.norms import ProvidedNorms
    from schedc_runtime.offload.lanes import Lanes


def mesh_for(plan: Plan, program: Program, mesh: Mesh | None) -> Mesh:
    """``mesh``, or without one that of the plan's lines. Raises `RuntimeFault` where the two differ.

    Either of them may say that dense parts are sharded.
    """
    if plan.shard_dense and plan.parallel is not None and plan.parallel.zero != 3:
        raise RuntimeFault(
            f"the plan says `shard dense` and zero {plan.parallel.zero}", "write `zero 3`, or leave `shard dense` out"
        )
    mesh = _mesh_of(plan, program, mesh)
    return replace(mesh, shard_dense=mesh.shard_dense or plan.shard_dense)


def _mesh_of(plan: Plan, program: Program, mesh: Mesh | None) -> Mesh:
    topology = plan.topology
    if plan.parallel is not None:
        mesh = parallel_mesh(plan, plan.parallel, program, mesh)
    if topology is None or mesh is None:
        experts, per_node = (topology.ranks, topology.per_node) if topology else (1, 0)
        return mesh or Mesh(program.ranks, experts, per_node=per_node)
    if (topology.ranks, topology.per_node) != (mesh.experts, mesh.per_node or mesh.experts):
        raise RuntimeFault(
            f"the plan's topology is {topology.nodes} nodes x {topology.per_node} ranks, in the mesh {mesh.experts}"
            f" ranks share the experts, {mesh.per_node or mesh.experts} in each node",
            "give both the same sizes, or leave the mesh out",
        )
    return mesh


def method_for(plan: Plan, layer: MoELayer, mesh: Mesh) -> str:
    """How rows travel: the plan's method, or for `auto` the one with the shortest exchange by the rows expected."""
    if plan.method is not Method.AUTO:
        return plan.method.value
    routing = layer.router.routing
    rail, node = (plan.topology.rail, plan.topology.node) if plan.topology else (0.0, 0.0)
    per_node = mesh.per_node or mesh.experts
    topology = Topology(mesh.experts // per_node, per_node, rail, node)
    return exchange.choose_method(routing, topology, plan.dispatch_bytes).method


def attach(
    modules: Iterable[nn.Module],
    plan: Plan,
    group: ExpertGroup,
    mesh: Mesh,
    replicas: Communicator | None = None,
    costs: CellCosts | None = None,
    kernels: Kernels = (),
    providers: NamedProviders = NOBODY_NAMED,
    *,
    host_lane: bool = False,
) -> None:
    """Spread the experts of one place's stage modules over ``group``, and let rows travel as the plan says.

    replicas: the ranks that hold the same stages; None for those of ``group``. costs: times of cells, by which hot
    experts pay or not. kernels, providers: as of a `Pipeline`. host_lane: see `MoELayer.attach`.
    """
    capacity = None if plan.capacity is None else ExpertCapacity(plan.capacity.factor, plan.capacity.drop)
    hot = None if plan.hot is None else HotPolicy(plan.hot.most, plan.hot.below, plan.hot.by_microbatch, costs=costs)
    for module in modules:
        layers = list(moe_layers(module))
        for name, layer in layers:
            layer.balance.sharing = mesh.tensor
            _take_products(plan, name, layer, kernels, providers["products"])
            layer.planner.name = name
        if not layers:
            continue
        carry = _carry(plan, providers["exchange"])
        wanted = Method.FLAT if carry and plan.method is Method.AUTO else method_for(plan, layers[0][1], mesh)
        method = next(method for method in METHODS if method == wanted)
        named: dict[str, Any] = {
            "bound": plan.bound,
            "host_lane": host_lane,
            "fp8_rows": plan.fp8_rows,
            "carry": carry,
            "even": _even(plan),
        }
        if group.size > 1:
            shard_experts(module, group, method, capacity, hot, replicas, **named)
        else:
            for _, layer in layers:
                layer.attach(group, method, capacity, None, replicas, **named, slices=bool(plan.row_slices))
        if plan.migrate is not None and group.size > 1:
            for _, layer in layers:
                layer.place(layer.experts.placement)
                layer.history = LoadHistory()


def _even(plan: Plan) -> EvenRows | None:
    """How rows become even by the plan's ``balance``; None without one."""
    balance = plan.balance
    if balance is None:
        return None
    inside = balance.inside_nodes(plan.topology.nodes if plan.topology else 1)
    return EvenRows(Fraction(repr(balance.within)), balance.in_place, balance.by == "step", balance.slots, inside)


def recompute_stages(stages: Iterable[Mapping[int, Stage]], plan: Plan, program: Program) -> None:
    """Let every stage recompute what the plan says, and make it ready for the program's Rs."""
    ahead = recomputed_ahead(program)
    for held in stages:
        for index, stage in held.items():
            if plan.recompute:
                stage.set_recomputation(plan.recompute_of(index))
            if index in ahead:
                stage.prepare_recompute()


def recomputed_ahead(program: Program) -> set[int]:
    """The stages that have Rs."""
    return {stage for stage, _ in recomputed_slots(program)}


def check_contradictions(plan: Plan, program: Program, mesh: Mesh) -> None:
    """Checks the values of a plan that was made in Python, as the lines of a plan are checked.

    Raises `DiagnosticError`.
    """
    if findings := verify_plan(plan, program.placement, mesh.experts):
        raise DiagnosticError(findings)


def _carry(plan: Plan, named: str) -> Callable[..., Any] | None:
    """What makes the carrier of a layer that a library carries rows of; None for torch's transport."""
    if named in ("", TORCH):
        return None
    if any(recompute.adaptive is not None for recompute in plan.recompute):
        raise RuntimeFault(
            f"exchange {named} and `recompute adaptive`: the numbers of rows by which it decides stay on the device",
            "write a level without a threshold, or let torch carry the rows",
        )
    from schedc_runtime.transit.exchangers import carried_by

    return partial(carried_by, named)


def _take_products(plan: Plan, name: str, layer: MoELayer, kernels: Kernels, named: str) -> None:
    """Let the plan's provider multiply, if it can serve the layer. The dtype under autocast is known when it runs.

    kernels: who multiplies how many rows where the plan names nobody. named: the provider that the user names.
    """
    experts = layer.experts
    experts.products = Products(named) if named else plan.products
    experts.measured = MeasuredProducts(kernels) if kernels else None
    try:
        experts.provider(plan.capacity is not None, plan.bound is None)
    except RuntimeFault as error:
        raise RuntimeFault(f"`{name}`: {error.message}", error.help) from None


def parallel_mesh(plan: Plan, parallel: Parallel, program: Program, mesh: Mesh | None) -> Mesh:
    """The mesh of ``parallel``: pipeline ranks, ep ranks that share experts, groups of them, tensor and context ranks.

    With ``zero 3`` it shards parameters outside of experts. ``zero 0`` and ``zero 1`` are one mesh: the optimizer is
    made by whoever trains. Raises `RuntimeFault` for `Parallel.refusal`, and for another ``mesh``.
    """
    if refusal := parallel.refusal:
        raise RuntimeFault(*refusal)
    per_node = plan.topology.per_node if plan.topology else min(parallel.ep, parallel.node)
    data, sharded = parallel.per_rank // max(parallel.ep, parallel.tp), parallel.zero == 3
    planned = Mesh(program.ranks, parallel.ep, data, per_node, sharded, tensor=parallel.tp, context=parallel.cp)
    if mesh is None:
        return planned
    if replace(mesh, high_priority=(), per_node=planned.per_node) != planned:
        raise RuntimeFault(
            f"the plan is for {planned.pipeline} x {planned.experts} x {planned.data} pipeline, expert and data ranks"
            f"{_beside(planned)}, the mesh has {mesh.pipeline} x {mesh.experts} x {mesh.data}{_beside(mesh)}",
            "give both the same sizes, or leave the mesh out",
        )
    return mesh


def _beside(mesh: Mesh) -> str:
    split = f" x {mesh.tensor} tensor ranks" if mesh.tensor > 1 else ""
    split += f", {mesh.context} replicas share each sequence" if mesh.context > 1 else ""
    return split + (" with sharded parameters" if mesh.shard_dense else "")


def offload_stages(
    program: Program, rank: int, held: StagesByIndex, device: torch.device, plan: Plan, name: str
) -> Lanes | None:
    """Let the stages of a rank move what the program's works move; the rank's lanes, None where nothing moves.

    held: the stages of the rank, by index. plan: of the pipeline. The bytes of its host limit the rank's buffers; host
    memory without a unit limits nothing here. name: what errors call the rank. Raises `RuntimeFault` for an ``offload``
    whose moves the program has not.
    """
    if plan.offload and plan.offload != program.plan.offload:
        raise RuntimeFault(
            "`offload` in plan=, and the program was compiled without it: its moves to the host are instructions",
            "write the lines `host` and `offload` into the plan of the schedule's text, and compile that",
        )
    moving, host = moving_microbatches(program, rank), plan.host
    if not moving:
        return None
    from schedc_runtime.offload.lanes import lanes_for
    from schedc_runtime.offload.rules import OffloadSettings

    lanes = lanes_for(device)
    lanes.buffers.name = name
    if host is not None and host.in_bytes:
        lanes.buffers.limit, lanes.buffers.slack = host.size, max(1.0, host.size / _most_on_host(program, rank))
    rules = {} if is_chosen(plan) else line_per_stage(plan.offload, program.stages, program.placement)
    for stage, microbatches in moving.items():
        named = frozenset(rules[stage].roles) if stage in rules else frozenset()
        there = held[stage].roles
        roles = named & there if there else named - {"dense"}  # a dense stage that runs as a whole moves as a whole
        held[stage].set_offload(OffloadSettings(lanes, roles=roles, microbatches=frozenset(microbatches)))
    return lanes


def _most_on_host(program: Program, rank: int) -> float:
    """The most bytes that lie on the host of a rank, by the works of the program; at least 1."""
    dependencies = Dependencies.of(computation(program)[0])
    low, high = dependencies.rank_start[rank : rank + 2] + np.array([rank, rank + 1])
    return max(1.0, float(placed_in(program).on_host(dependencies)[low:high].max()))


def told_buffers(lanes: Iterable[Lanes]) -> list[str]:
    """A line for each rank here that has had host buffers: the most bytes, and of what memory."""
    return [
        f"{buffers.name}: host buffers took {buffers.most:,} bytes at most, {buffers.memory}"
        for of_rank in lanes
        if (buffers := of_rank.buffers).most
    ]


def moving_microbatches(program: Program, rank: int) -> dict[int, set[int]]:
    """By stage: the microbatches that leave the device on that rank."""
    rows = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    works, moving = program.works, dict[int, set[int]]()
    for work in program.work[rows][np.asarray(program.kind[rows]) == InstructionKind.START].tolist():
        if works.kind[work] == WorkKind.OFFLOAD:
            moving.setdefault(int(works.stage[work]), set()).add(int(works.microbatch[work]))
    return moving


def check_exact(fuse: Fuse | None) -> None:
    """Refuses what rounds otherwise where results are compared bit by bit; `auto` passes. Raises `RuntimeFault`."""
    rounding = [name for name in fuse.names if not FUSIONS[name].exact] if fuse is not None else []
    if fuse is not None and (rounding or fuse.compiled):
        what = rounding[0] if rounding else COMPILED
        raise RuntimeFault(
            f"fuse {what}: gradients round otherwise, and bits are to be compared",
            f"leave `{what}` out of the line, or `--check bitwise` out",
        )


def fused_blocks(
    fuse: Fuse | None, compile: CompileSettings | None, stages: Iterable[Stage], aliases: Mapping[str, str]
) -> FusedStages | None:
    """The fused blocks of ``stages``; None without a plan's line. A block's code is made at the first call.

    Raises `RuntimeFault` beside ``compile``.
    """
    if fuse is None:
        return None
    if compile is not None:
        raise RuntimeFault(
            "compile= and `fuse` in the plan exclude each other: torch.compile fuses what it compiles",
            "leave `fuse` out of the plan, or compile= out of the pipeline; `fuse auto compiled` lets torch.compile"
            " make the kernels of the chains",
        )
    from schedc_runtime.fusion.fused_stages import FusedStages

    return FusedStages(fuse, stages, aliases)


def provided_norms(
    name: str, model: nn.Module, stages: Iterable[Stage], device: torch.device, fuse: Fuse | None, *, compiled: bool
) -> ProvidedNorms | None:
    """The RMSNorms of ``stages`` that the provider of a name computes; None where none is named, or torch.

    compiled: whether compile= is given. Raises `RuntimeFault` beside it, and where the provider cannot serve.
    """
    if name in ("", TORCH):
        return None
    from schedc_runtime.fusion.norms import ProvidedNorms, check_beside

    check_beside(name, fuse, compiled=compiled)
    return ProvidedNorms(name, model, stages, device)
