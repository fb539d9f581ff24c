"""Shards the dense parts of the stages here, as the mesh says, or applies a user's function to the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from schedc_runtime.data_parallel.shards_in_process import InProcessSharding
from schedc_runtime.data_parallel.stage_replicas import Sharding
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.shards import parameters_of_experts
from schedc_runtime.partition.shared import copies_in
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.replica_works import agree_on_bytes, bytes_of_stages, together
from schedc_runtime.pipeline.build.stages import stages_on
from schedc_runtime.ranks.mesh import Coordinate


def sharding_of(assembly: Assembly) -> Sharding[Any]:
    """How dense parts are sharded here; raises `RuntimeFault` where they cannot be."""
    network = assembly.network
    if network.in_process:
        return InProcessSharding(assembly.program, assembly.mesh, network.peer_groups)
    from schedc_runtime.data_parallel.fsdp import DenseSharding  # FSDP2 takes a second to import

    return DenseSharding(assembly.program, assembly.mesh, assembly.settings.timeout)


def take_shards(assembly: Assembly, place: Coordinate, modules: Sequence[nn.Module]) -> None:
    """Shard the dense parts of a place's modules, where the mesh says so. A collective of the replicas."""
    if assembly.shards is not None:
        held = dict(zip(stages_on(assembly.program, place.pipeline), modules, strict=True))
        assembly.shards.take(place, modules, assembly.device, copies_in(held, assembly.tied))


ParallelizeStage = Callable[[nn.Module, Any], Any]
"""fn(stage module, device mesh): changes the module in place."""


def parallelize(assembly: Assembly, function: ParallelizeStage) -> None:
    """Apply ``function`` to the stages here. Stages in which it calls `fully_shard` are gathered by the stream."""
    if assembly.shards is not None:
        raise RuntimeFault(
            "the dense parts are sharded already: the mesh has shard_dense", "leave shard_dense out of the mesh"
        )
    modules = [stage.module for stage in assembly.held()]
    mesh = _device_mesh(assembly)
    with assembly.partition.records.changed_by_pipeline():
        for module in modules:
            function(module, mesh)
        if any(_is_sharded(part) for module in modules for part in module.modules()):
            if assembly.network.in_process:
                raise RuntimeFault(
                    "FSDP2 shards over processes, and all ranks are in this one", "shard by Mesh(..., shard_dense=True)"
                )
            from schedc_runtime.data_parallel.fsdp import DenseSharding  # FSDP2 takes a second to import

            assembly.mesh.refuse_beside_splits({"`fully_shard`": True})
            _check_shards(assembly, modules)
            assembly.shards = shards = DenseSharding(assembly.own.alone, assembly.mesh, assembly.settings.timeout)
            shards.adopt(modules)
            assembly.shards.shard()
    with assembly.guard("parallelizing the stages"):
        mine = bytes_of_stages(assembly)
        agree_on_bytes(assembly, assembly.guard.control.fold("parallelizing the stages", mine or None, together))
    assembly.program = assembly.own.training(assembly.stage_bytes)
    assembly.bound_code.shards = assembly.shards
    assembly.bound_code.forget()


def _check_shards(assembly: Assembly, modules: Sequence[nn.Module]) -> None:
    """Raise `RuntimeFault` for shards of experts that other ranks share, and for shards over others than replicas."""
    from torch.distributed.tensor import DTensor

    replicas = assembly.mesh.replicas_of(assembly.places[0])
    for module in modules:
        experts = {id(parameter) for _, parameter in parameters_of_experts(module)}
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) in experts:
                raise RuntimeFault(
                    f"`{name}` was sharded, and each rank of an expert group holds other experts",
                    "leave experts out: `fully_shard(..., ignored_params={p for _, p in parameters_of_experts(stage)})`"
                    " with `schedc_runtime.moe.shards.parameters_of_experts`",
                )
            if sorted(over := parameter.device_mesh.mesh.flatten().tolist()) != sorted(replicas):
                raise RuntimeFault(
                    f"`{name}` was sharded over the processes {over}, and its replicas are {replicas}",
                    'shard over all of them, as `mesh["dp"]` does',
                )


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _device_mesh(assembly: Assembly) -> Any:
    """A torch mesh [pipeline, replicas] of the processes, with the axes ``pp`` and ``dp``; None in one process.

    With tensor ranks it is [pipeline, replicas, tensor], and has the axis ``tp``.
    """
    if assembly.network.in_process:
        return None
    if assembly.settings.group is not None:
        raise RuntimeFault(
            "a process group was given, and a device mesh spans all processes", "leave `group` out of the pipeline"
        )
    from torch.distributed.device_mesh import DeviceMesh

    mesh = assembly.mesh
    axes = {"pp": mesh.pipeline, "dp": mesh.replicas} | ({"tp": mesh.tensor} if mesh.tensor > 1 else {})
    ranks = torch.arange(mesh.size).view(*axes.values())
    return DeviceMesh(assembly.device.type, ranks, mesh_dim_names=tuple(axes))
