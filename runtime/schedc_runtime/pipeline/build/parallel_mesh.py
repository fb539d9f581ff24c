"""The mesh that the ``parallel`` line of a plan says, and what the runtime refuses of such a line."""

from __future__ import annotations

from dataclasses import replace

from schedc.ir.parallel import Parallel
from schedc.ir.plan import Plan
from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Mesh


def parallel_mesh(plan: Plan, parallel: Parallel, program: Program, mesh: Mesh | None) -> Mesh:
    """The mesh of ``parallel``: pipeline ranks, ep ranks that share experts, dp / ep groups of them.

    With ``zero 3`` it shards parameters outside of experts. ``zero 0`` and ``zero 1`` are one mesh: the optimizer is
    made by whoever trains. Raises `RuntimeFault` for what the runtime does not carry out, and for another ``mesh``.
    """
    if parallel.tp > 1 or parallel.cp > 1:
        raise RuntimeFault(
            f"the plan says tp {parallel.tp} and cp {parallel.cp}; a pipeline splits no product and no sequence",
            "train with Megatron-LM: `schedc export PLAN --to megatron` writes its flags; or write `tp 1 cp 1`",
        )
    if parallel.zero == 2:
        raise RuntimeFault(
            "the plan says zero 2, and a pipeline shards no gradients without their parameters",
            "write `zero 1`, or `zero 3` to shard parameters too",
        )
    per_node = plan.topology.per_node if plan.topology else min(parallel.ep, parallel.node)
    planned = Mesh(program.ranks, parallel.ep, parallel.dp // parallel.ep, per_node, parallel.zero == 3)
    if mesh is None:
        return planned
    if replace(mesh, high_priority=(), per_node=planned.per_node) != planned:
        raise RuntimeFault(
            f"the plan is for {planned.pipeline} x {planned.experts} x {planned.data} pipeline, expert and data ranks"
            f"{_sharded(planned)}, the mesh has {mesh.pipeline} x {mesh.experts} x {mesh.data}{_sharded(mesh)}",
            "give both the same sizes, or leave the mesh out",
        )
    return mesh


def _sharded(mesh: Mesh) -> str:
    return " with sharded parameters" if mesh.shard_dense else ""
