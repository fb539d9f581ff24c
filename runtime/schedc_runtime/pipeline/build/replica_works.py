"""Puts the works among replicas into a pipeline's programs: sums of gradients, gathers and drops of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from schedc.ir.program import Program, computation
from schedc.ir.works import FACTS, WorkGroup, WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.forward_only import forward_only
from schedc.step.program.insert_works import insert_works, placed_in, without_works
from schedc.step.timeline import durations
from schedc.step.works.place_replica_works import ReplicaBytes, place_replica_works
from schedc_runtime.data_parallel.gradient_sums import is_dense_shard
from schedc_runtime.data_parallel.stage_replicas import StageBytes, group_of_replicas, kept_whole, summed_stages
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.shared import copies_in
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.mesh import Coordinate, Mesh

REPLICATED = (WorkKind.GATHER, WorkKind.DROP, WorkKind.SCATTER, WorkKind.SPREAD)
"""The works that replicas of a rank do together, and drops of what they gather."""


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
    if (mesh.data if group is WorkGroup.SAME_EXPERTS else mesh.replicas) == 1:
        return 0
    return sum(
        _size(parameter)
        for parameter in parameters
        if parameter.requires_grad and group_of_replicas(parameter) is group
    )


def _size(parameter: nn.Parameter) -> int:
    """Bytes of the whole parameter."""
    return parameter.numel() * parameter.element_size()


def bytes_of_stages(assembly: Assembly) -> dict[int, StageBytes]:
    """Bytes that works among replicas move for each stage of the first replica here; {} without replicas."""
    if assembly.mesh.replicas == 1:
        return {}
    sizes: dict[int, StageBytes] = {}
    for place in assembly.places:
        if place.replica == assembly.places[0].replica:
            sizes |= stage_bytes(assembly, place)
    return sizes


def together(everyone: Iterable[Mapping[Any, Sequence[float]] | None]) -> dict[Any, Sequence[float]]:
    """The bytes of all stages. everyone: [processes] those that each process knows."""
    return {stage: sizes for part in everyone for stage, sizes in (part or {}).items()}


def agree_on_bytes(assembly: Assembly, all_bytes: Mapping[Any, Sequence[float]]) -> None:
    """Keep the bytes of all stages."""
    assembly.stage_bytes = {int(stage): StageBytes(*sizes) for stage, sizes in all_bytes.items()}


def place_works(assembly: Assembly) -> None:
    """Put the works among replicas into the program. They follow from what all ranks have agreed on.

    Those of a program that was compiled with them keep their places. Raises `RuntimeFault` if the model needs others.
    """
    program, dependencies = assembly.program, Dependencies.of(computation(assembly.program)[0])
    works = placed_in(program)
    among = np.isin(works.works.kind, REPLICATED)
    assembly.placed, assembly.alone = works.only(among), program
    if among.any():
        assembly.alone = insert_works(without_works(program), dependencies, works.only(~among))
    assembly.program = program_with_works(assembly)


def program_with_works(assembly: Assembly) -> Program:
    """The program of a training step, with the works among replicas."""
    placed, alone = assembly.placed, assembly.alone
    if not len(placed) or not assembly.stage_bytes:
        return with_replica_works(alone, assembly.stage_bytes, training=True)
    dependencies = Dependencies.of(computation(alone)[0])
    needed = _placed(dependencies, assembly.stage_bytes, training=True)
    if missing := _named(needed, dependencies) ^ _named(placed, dependencies):
        raise RuntimeFault(
            f"the works among replicas in the program are not those of the model; one differs: {min(missing)}",
            "compile the plan with the parameters of this model, or without --replicas",
        )
    return insert_works(alone, dependencies, placed)


def _named(placed: PlacedWorks, dependencies: Dependencies) -> set[str]:
    """The works by what they are for. A stage may be gathered and dropped any number of times."""
    counts: Counter[str] = Counter()
    for row, rank in enumerate(placed.rank_of(placed.start, dependencies).tolist()):
        work = placed.works.work(row)
        counts[f"rank {rank}: {FACTS[work.kind].name} of stage {work.stage}, {work.group.name.lower()}"] += 1
    return {name if " gather " in name or " drop " in name else f"{name}, {count}" for name, count in counts.items()}


def evaluation_of(assembly: Assembly) -> Program:
    """The program of an evaluation: forwards, with gathers of sharded parameters."""
    return with_replica_works(forward_only(assembly.alone), assembly.stage_bytes, training=False)


def with_replica_works(program: Program, sizes: Mapping[int, StageBytes], *, training: bool) -> Program:
    """The program with the works that replicas need. sizes: of every stage. training: whether gradients are summed.

    A pipeline knows no times. Ops take one unit each, and so does a collective of the largest stage: gathers start as
    far ahead as that asks for.
    """
    if not sizes:
        return program
    dependencies = Dependencies.of(computation(program)[0])
    return insert_works(program, dependencies, _placed(dependencies, sizes, training))


def _placed(dependencies: Dependencies, sizes: Mapping[int, StageBytes], training: bool) -> PlacedWorks:
    stages = dependencies.schedule.stages
    costs = Costs().resolved(stages)
    columns = np.array([sizes.get(stage, StageBytes()) for stage in range(stages)], np.float64)
    per_byte = 1.0 / max(1.0, float(columns.sum(axis=1).max()))
    return place_replica_works(
        dependencies,
        ReplicaBytes(*columns.T),
        duration=durations(dependencies, costs),
        latency=costs.p2p,
        per_byte=(per_byte, per_byte),
        training=training,
    )
