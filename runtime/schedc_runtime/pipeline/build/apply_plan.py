"""Carries out a plan on the model of one process: experts spread, rows exchanged, stages recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from schedc.cell import CellCosts
from schedc.diagnostics import DiagnosticError
from schedc.ir.program import Program
from schedc.ir.recomputed import recomputed_slots
from schedc.ir.verify_plan import verify_plan
from schedc.plan import Method, Plan, Topology
from schedc.step.costs import exchange
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.capacity import ExpertCapacity
from schedc_runtime.moe.hot_choice import HotPolicy
from schedc_runtime.moe.kernels import Kernels, MeasuredProducts
from schedc_runtime.moe.layer import METHODS, MoELayer, moe_layers
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.pipeline.build.parallel_mesh import parallel_mesh
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.collectives import Communicator


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
    *,
    host_lane: bool = False,
) -> None:
    """Spread the experts of one place's stage modules over ``group``, and let rows travel as the plan says.

    replicas: the ranks that hold the same stages; None for those of ``group``. costs: times of cells, by which hot
    experts pay or not. kernels: as of a `Pipeline`. host_lane: see `MoELayer.attach`.
    """
    capacity = None if plan.capacity is None else ExpertCapacity(plan.capacity.factor, plan.capacity.drop)
    hot = None if plan.hot is None else HotPolicy(plan.hot.most, plan.hot.below, plan.hot.by_microbatch, costs=costs)
    for module in modules:
        for name, layer in moe_layers(module):
            _take_products(plan, name, layer, kernels)
        layers = [layer for _, layer in moe_layers(module)]
        if not layers:
            continue
        for name, layer in moe_layers(module):
            layer.planner.name = name
        wanted = method_for(plan, layers[0], mesh)
        method = next(method for method in METHODS if method == wanted)
        if group.size > 1:
            shard_experts(
                module, group, method, capacity, hot, replicas,
                bound=plan.bound, host_lane=host_lane, fp8_rows=plan.fp8_rows,
            )  # fmt: skip
        else:
            for layer in layers:
                layer.attach(
                    group, method, capacity, replicas=replicas,
                    bound=plan.bound, host_lane=host_lane, fp8_rows=plan.fp8_rows, slices=bool(plan.slices),
                )  # fmt: skip


def recompute_stages(stages: Iterable[Mapping[int, Stage]], plan: Plan, program: Program) -> None:
    """Let every stage recompute what the plan says, and make it ready for the program's Rs."""
    ahead = {stage for stage, _ in recomputed_slots(program)}
    for held in stages:
        for index, stage in held.items():
            if plan.recompute:
                stage.set_recomputation(plan.recompute_of(index))
            if index in ahead:
                stage.prepare_recompute()


def check_contradictions(plan: Plan, program: Program, mesh: Mesh) -> None:
    """Checks the values of a plan that was made in Python, as the lines of a plan are checked.

    Raises `DiagnosticError`.
    """
    if findings := verify_plan(plan, program.placement, mesh.experts):
        raise DiagnosticError(findings)


def _take_products(plan: Plan, name: str, layer: MoELayer, kernels: Kernels) -> None:
    """Let the plan's provider multiply, if it can serve the layer. The dtype under autocast is known when it runs.

    kernels: who multiplies how many rows where the plan names nobody.
    """
    experts = layer.experts
    experts.products = plan.products
    experts.measured = MeasuredProducts(kernels) if kernels else None
    try:
        experts.provider(plan.capacity is not None, plan.bound is None)
    except RuntimeFault as error:
        raise RuntimeFault(f"`{name}`: {error.message}", error.help) from None
