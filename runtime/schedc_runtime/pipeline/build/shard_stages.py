"""Shards the dense parts of the stages here, where the mesh says so: by FSDP2, or among replicas in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from schedc_runtime.data_parallel.sharding import Sharding
from schedc_runtime.data_parallel.shards_in_process import InProcessSharding
from schedc_runtime.partition.shared import copies_in
from schedc_runtime.pipeline.build.assembly import Assembly
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
