"""A program's works among replicas: sums of gradients, gathers and drops of parameters, and where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schedc.ir.program import Program, computation
from schedc.ir.works import FACTS, WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.forward_only import forward_only
from schedc.step.program.insert_works import insert_works, placed_in, without_works
from schedc.step.timeline import durations
from schedc.step.works.place_replica_works import ReplicaBytes, place_replica_works
from schedc_runtime.data_parallel.stage_replicas import StageBytes
from schedc_runtime.errors import RuntimeFault

_REPLICATED = (WorkKind.GATHER, WorkKind.DROP, WorkKind.SCATTER, WorkKind.SPREAD)
"""The works that replicas of a rank do together, and drops of what they gather."""


class OwnWorks(NamedTuple):
    """A program without works among replicas, and the works that it was compiled with, at their places."""

    alone: Program
    placed: PlacedWorks

    @classmethod
    def of(cls, program: Program) -> OwnWorks:
        """Take the works among replicas out of a program; others stay where they are."""
        works = placed_in(program)
        among = np.isin(works.works.kind, _REPLICATED)
        if not among.any():
            return cls(program, works.only(among))
        dependencies = Dependencies.of(computation(program)[0])
        return cls(insert_works(without_works(program), dependencies, works.only(~among)), works.only(among))

    def training(self, sizes: Mapping[int, StageBytes]) -> Program:
        """The program of a training step. sizes: of every stage.

        Works that the program was compiled with keep their places. Raises `RuntimeFault` if the model needs others.
        """
        if not len(self.placed) or not sizes:
            return with_replica_works(self.alone, sizes, training=True)
        dependencies = Dependencies.of(computation(self.alone)[0])
        needed = _placed(dependencies, sizes, training=True)
        if missing := _named(needed, dependencies) ^ _named(self.placed, dependencies):
            raise RuntimeFault(
                f"the works among replicas in the program are not those of the model; one differs: {min(missing)}",
                "compile the plan with the parameters of this model, or without --replicas",
            )
        return insert_works(self.alone, dependencies, self.placed)

    def evaluation(self, sizes: Mapping[int, StageBytes]) -> Program:
        """The program of an evaluation: forwards, with gathers of sharded parameters. sizes: of every stage."""
        return with_replica_works(forward_only(self.alone), sizes, training=False)


def _named(placed: PlacedWorks, dependencies: Dependencies) -> set[str]:
    """The works by rank, stage and group, with numbers. A stage may be gathered and dropped any number of times."""
    counts: Counter[str] = Counter()
    for row, rank in enumerate(placed.rank_of(placed.start, dependencies).tolist()):
        work = placed.works.work(row)
        counts[f"rank {rank}: {FACTS[work.kind].name} of stage {work.stage}, {work.group.name.lower()}"] += 1
    return {name if " gather " in name or " drop " in name else f"{name}, {count}" for name, count in counts.items()}


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
