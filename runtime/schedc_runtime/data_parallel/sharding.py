"""What every way of sharding the dense parts of stages asks of a program and a mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from schedc.ir.program import InstructionKind, Program
from schedc_runtime.data_parallel.stage_replicas import StageShards
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Coordinate, Mesh

Shards = TypeVar("Shards", bound=StageShards)


class Sharding(ABC, Generic[Shards]):
    """The sharded dense parts of all stages of a process: by FSDP2, or of replicas that share the process.

    Raises `RuntimeFault` where they cannot be sharded (`check_sharding`).
    """

    def __init__(self, program: Program, mesh: Mesh) -> None:
        check_sharding(program, mesh)
        self._shards: dict[int, Shards] = {}
        """The shards of each stage, by the id of its module."""

    @abstractmethod
    def take(
        self, place: Coordinate, modules: Sequence[nn.Module], device: torch.device, tied: Iterable[nn.Parameter] = ()
    ) -> None:
        """Shard the dense parameters of a place's modules over its replicas. A collective of the replicas.

        Experts stay as they are, and so do parameters that several stages of the place share, or that are ``tied`` to
        stages of other ranks. All are whole until `shard`.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give up the collectives in flight."""

    @abstractmethod
    def parts_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of whole tensors as ``module`` loads it: with this replica's shard of sharded parameters."""

    def shard(self) -> None:
        """Free the whole parameters of all stages, once the pipeline is built."""
        for shards in self._shards.values():
            shards.drop()

    def of(self, module: nn.Module) -> Shards:
        """The shards of a stage's module."""
        return self._shards[id(module)]

    def reset(self) -> None:
        """Forget a step that will not be finished; all stages have shards again."""
        for shards in self._shards.values():
            shards.reset()


def check_sharding(program: Program, mesh: Mesh) -> None:
    """Raise `RuntimeFault` where dense parts cannot be sharded: without replicas, with two copies of a stage."""
    refusals = [
        (
            mesh.replicas == 1,
            "the mesh has one replica",
            "give a mesh with experts= or data=, or leave the sharding out of the mesh and the plan",
        ),
        (
            bool(((program.kind == InstructionKind.REDUCE) & (program.stage2 < 0)).any()),
            f"{program.name} holds two copies of every stage",
            "take a schedule with one, as dualpipev in place of dualpipe",
        ),
    ]
    for refused, why, help in refusals:
        if refused:
            raise RuntimeFault(f"the dense part cannot be sharded: {why}", help)
