"""Puts the works among replicas into a pipeline's program, by the bytes of its stages that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from schedc.ir.works import WorkGroup
from schedc_runtime.data_parallel.gradient_sums import is_dense_shard, is_expert
from schedc_runtime.data_parallel.stage_replicas import StageBytes, group_of_replicas, kept_whole, summed_stages
from schedc_runtime.partition.shared import copies_in
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.own_works import OwnWorks
from schedc_runtime.ranks.mesh import Coordinate, Mesh


def stage_bytes(assembly: Assembly, place: Coordinate) -> dict[int, StageBytes]:
    """The bytes of each stage of a place."""
    mesh, sharded = assembly.mesh, assembly.mesh.shard_dense
    modules = {index: stage.module for index, stage in assembly.stages[place].items()}
    copies = list(copies_in(modules, assembly.tied))
    kept = kept_whole(modules.values(), copies)
    bytes_of = {}
    for stage in summed_stages(assembly.program.instructions(place.pipeline), modules, copies):
        now, late = ([p for p in part if p in kept or not sharded] for part in (stage.now, stage.late))
        dense, experts = (_summed(late if stage.copied else now, group, mesh) for group in _AMONG)
        last = 0 if stage.copied else _summed(late, WorkGroup.REPLICAS, mesh)
        bytes_of[stage.index] = StageBytes(dense, experts, last=last)
    for index, module in modules.items():
        shards = [p for p in module.parameters() if is_dense_shard(p) or (sharded and p not in kept)]
        bytes_of[index] = bytes_of.get(index, StageBytes())._replace(sharded=sum(map(_size, shards)))
    return bytes_of


_AMONG = WorkGroup.REPLICAS, WorkGroup.SAME_EXPERTS


def _summed(parameters: Iterable[nn.Parameter], group: WorkGroup, mesh: Mesh) -> int:
    """Bytes of the gradients that a group of replicas sums."""
    return sum(
        _size(parameter)
        for parameter in parameters
        if parameter.requires_grad and group_of_replicas(parameter) is group and _members(parameter, group, mesh) > 1
    )


def _members(parameter: nn.Parameter, group: WorkGroup, mesh: Mesh) -> int:
    """Number of processes that sum a parameter's gradient."""
    same = mesh.expert_groups if is_expert(parameter) else mesh.replicas
    return same if group is WorkGroup.SAME_EXPERTS else mesh.peers


def _size(parameter: nn.Parameter) -> int:
    """Bytes of the whole parameter."""
    return parameter.numel() * parameter.element_size()


def bytes_of_stages(assembly: Assembly) -> dict[int, StageBytes]:
    """Bytes that works among replicas move for each stage of the first replica here; {} without others."""
    if assembly.mesh.peers == 1:
        return {}
    sizes: dict[int, StageBytes] = {}
    for place in assembly.places:
        if place.replica == assembly.places[0].replica:
            sizes |= stage_bytes(assembly, place)
    return sizes


def together(everyone: Iterable[Mapping[Any, Sequence[float]] | None]) -> dict[Any, Sequence[float]]:
    """The bytes of all stages. everyone: [processes] the bytes by stage, or None."""
    return {stage: sizes for part in everyone for stage, sizes in (part or {}).items()}


def agree_on_bytes(assembly: Assembly, all_bytes: Mapping[Any, Sequence[float]]) -> None:
    """Keep the bytes of all stages."""
    assembly.stage_bytes = {int(stage): StageBytes(*sizes) for stage, sizes in all_bytes.items()}


def place_works(assembly: Assembly) -> None:
    """Put the works among replicas into the program. They follow from what all ranks have agreed on."""
    assembly.own = OwnWorks.of(assembly.program)
    assembly.program = assembly.own.training(assembly.stage_bytes)
