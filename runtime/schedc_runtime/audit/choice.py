"""Chooses the microbatch that is repeated in a step, of each rank in turn, and the rank that repeats it.

A round visits every rank. In every second round a rank's stage is asked for the microbatch whose weight gradients come
first: they are then its own. In the other rounds each microbatch has its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import Program, computation
from schedc_runtime.ranks.mesh import Coordinate, Mesh


class Helper(NamedTuple):
    """A place that can repeat the microbatch of a suspect. borrows: whether it is sent the weights of the stage."""

    place: Coordinate
    borrows: bool


class AuditCase(NamedTuple):
    """The microbatch that is repeated in a step.

    helpers: places that can repeat the microbatch. The first does so, and the second where bits differ.
    defer: whether the program computes the weight gradients of the microbatch in a W.
    first: whether no other microbatch adds weight gradients before.
    """

    suspect: Coordinate
    stage: int
    microbatch: int
    defer: bool
    first: bool
    helpers: tuple[Helper, ...]


class CaseTable:
    """The cases of a program on a mesh.

    fits: whether a place may repeat what a stage of another one computes: (place, other, borrows).
    """

    def __init__(
        self, program: Program, mesh: Mesh, fits: Callable[[Coordinate, Helper, int], bool] = lambda *_: True
    ) -> None:
        self._mesh, self._fits = mesh, fits
        schedule, _ = computation(program)
        self._columns = schedule.rank, schedule.stage, schedule.microbatch, schedule.kind
        self.home = self._homes()
        """[stages, microbatches] the rank that runs a microbatch through a stage."""
        self.suspects = [Coordinate(rank, replica) for replica in range(mesh.replicas) for rank in range(mesh.pipeline)]
        """All places, in the order of their turns."""
        self._holders = [sorted(set(program.placement.rank_of_stage[:, stage].tolist()))
                         for stage in range(program.stages)]  # fmt: skip

    def case(self, number: int) -> AuditCase | None:
        """The case of the audit with a number, counted from 0; None where nobody can repeat it."""
        suspect, visit = self.suspects[number % len(self.suspects)], number // len(self.suspects)
        rank, stage_of, microbatch_of, kind = self._columns
        own = rank == suspect.pipeline
        stages = np.unique(stage_of[own])
        visit, position = divmod(visit, len(stages))
        stage = int(stages[position])
        here = own & (stage_of == stage)
        weights = here & np.array([FACTS[OpKind(each)].weight for each in kind])
        microbatch = first = int(microbatch_of[weights][0])
        if visit % 2:
            forwards = microbatch_of[here & (kind == OpKind.F)]
            microbatch = int(forwards[visit // 2 % len(forwards)])
        at = here & (microbatch_of == microbatch)
        helpers = self._helpers(suspect, stage, visit)
        defer = bool((kind[at] == OpKind.W).any())
        return AuditCase(suspect, stage, microbatch, defer, microbatch == first, helpers) if helpers else None

    def _helpers(self, suspect: Coordinate, stage: int, visit: int) -> tuple[Helper, ...]:
        """Ranks with the same weights, in turn. Behind them come other ranks of the pipeline, which borrow weights."""
        ranks = [rank for rank in self._holders[stage] if rank != suspect.pipeline]
        replicas = [replica for replica in range(self._mesh.replicas) if replica != suspect.replica]
        holders = [Helper(suspect._replace(pipeline=rank), False) for rank in ranks]
        holders += [Helper(suspect._replace(replica=replica), False) for replica in replicas]
        others = ((suspect.pipeline + step) % self._mesh.pipeline for step in range(1, self._mesh.pipeline))
        borrowers = [
            Helper(suspect._replace(pipeline=rank), True) for rank in others if rank not in self._holders[stage]
        ]
        listed = [*_turned(holders, visit), *borrowers]
        return tuple(helper for helper in listed if self._fits(suspect, helper, stage))

    def _homes(self) -> np.ndarray:
        rank, stage, microbatch, kind = self._columns
        forwards = kind == OpKind.F
        homes = np.full((stage.max() + 1, microbatch.max() + 1), -1)
        homes[stage[forwards], microbatch[forwards]] = rank[forwards]
        return homes


def _turned(helpers: Sequence[Helper], by: int) -> Sequence[Helper]:
    first = by % len(helpers) if helpers else 0
    return [*helpers[first:], *helpers[:first]]
