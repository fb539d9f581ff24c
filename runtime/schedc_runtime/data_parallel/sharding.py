"""What every way of sharding the dense parts of stages asks of a program and a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from schedc.ir.program import InstructionKind, Program
from schedc_runtime.data_parallel.stage_replicas import StageShards
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Coordinate, Mesh


class Sharding(Protocol):
    """The sharded dense parts of all stages of a process: by FSDP2, or of replicas that share the process."""

    def take(
        self, place: Coordinate, modules: Sequence[nn.Module], device: torch.device, tied: Iterable[nn.Parameter] = ()
    ) -> None: ...

    def shard(self) -> None: ...

    def of(self, module: nn.Module) -> StageShards: ...

    def reset(self) -> None: ...

    def abort(self) -> None: ...

    def parts_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


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
