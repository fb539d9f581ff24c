"""What a pipeline consists of: the value that the steps of `assemble` set piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from schedc.cell import CellCosts
from schedc.cell.issue_order import CellOnRank
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc.step.placed_works import PlacedWorks
from schedc_runtime.data_parallel.sharding import Sharding
from schedc_runtime.data_parallel.stage_replicas import StageBytes
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.moe.kernels import Kernels
from schedc_runtime.partition import Partition
from schedc_runtime.partition.shared import SharedParameter
from schedc_runtime.pipeline.agree.guard import FailureGuard
from schedc_runtime.pipeline.agree.plan_fit import FirstBatch
from schedc_runtime.pipeline.agree.rows import Dim, Dims, dims_of
from schedc_runtime.pipeline.build.bound import BoundCode
from schedc_runtime.pipeline.build.cut import Cut
from schedc_runtime.pipeline.build.loss_function import LossHead, LossOfMicrobatch
from schedc_runtime.pipeline.build.stages import (
    StagesByIndex,
)
from schedc_runtime.pipeline.build.tied import TiedWeights
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.ranks.network import Network
from schedc_runtime.stage.stage import Stage

if TYPE_CHECKING:
    from schedc_runtime.compiled.settings import CompileSettings
    from schedc_runtime.compiled.units import CompiledUnits
    from schedc_runtime.fusion.fused_stages import FusedStages
    from schedc_runtime.materialize.construction import Construction
    from schedc_runtime.offload.lanes import Lanes


@dataclass(frozen=True)
class Settings:
    """The arguments of a `Pipeline`, which explains them. timeout: seconds."""

    model: nn.Module
    program: Program
    loss_fn: LossOfMicrobatch | None
    cut: Cut
    mesh: Mesh | None
    plan: Plan | None
    cells: CellCosts | CellSource | None
    group: dist.ProcessGroup | None
    in_process: bool
    timeout: float
    device: torch.device | None = None
    rng: str = "by name"
    seed: int = 0
    example: Any = None
    example_dims: Mapping[str, Dim] | None = None
    compile: bool | Mapping[str, Any] | None = None
    kernels: Kernels = ()

    @property
    def dims(self) -> Dims:
        """The dimensions of the rows of a batch's tensors. Raises `RuntimeFault` for what is none."""
        return dims_of(self.model, self.example_dims, self.cut.inputs)


@dataclass
class Assembly:
    """What a pipeline consists of; each step of `STEPS` in `schedc_runtime.pipeline.build.assemble` sets some.

    program: that of the settings; from `tie_weights` on with the sums of tied weights, from `place_works` on with the
    works among replicas. alone: without these. placed: those that the program was compiled with. stage_bytes: what they
    move for each stage.
    construction: where the values of each of the model's tensors come from. has_values: whether all tensors here were
    seen off the meta device.
    first_batch: compares the plan's tokens with it. names: shape and dtype of each entry of the model's state.
    shards: shards of the dense parts, where these are sharded. tied: the parameters of which several ranks need a copy.
    weights: the copies that are here.
    head: the loss function of the last stages. stages: stages of each place in this process, by index.
    copied: those that another rank holds, too. compile: settings of compiled units. compiled: the units, if any.
    fused: blocks with fused chains, if any.
    lanes: where offloads and fetches run, of each place here whose program has some.
    cells: the order inside each kind of instruction on segmented stages, of this process's first replica.
    """

    settings: Settings
    construction: Construction = field(init=False)
    has_values: bool = False
    device: torch.device = field(init=False)
    plan: Plan = field(init=False)
    mesh: Mesh = field(init=False)
    network: Network = field(init=False)
    program: Program = field(init=False)
    placed: PlacedWorks = field(init=False)
    alone: Program = field(init=False)
    stage_bytes: dict[int, StageBytes] = field(init=False)
    partition: Partition = field(init=False)
    first_batch: FirstBatch = field(init=False)
    tied: tuple[SharedParameter, ...] = field(init=False)
    weights: TiedWeights = field(init=False)
    names: dict[str, tuple[torch.Size, torch.dtype]] = field(init=False)
    shards: Sharding[Any] | None = None
    head: LossHead = field(init=False)
    stages: dict[Coordinate, StagesByIndex] = field(init=False)
    copied: list[Stage] = field(init=False)
    compile: CompileSettings | None = field(init=False)
    compiled: CompiledUnits | None = None
    fused: FusedStages | None = None
    lanes: list[Lanes] = field(default_factory=list)
    cell_source: CellSource = field(init=False)
    cells: dict[str, CellOnRank] = field(init=False)
    bound_code: BoundCode = field(init=False)
    guard: FailureGuard = field(init=False)

    @property
    def places(self) -> list[Coordinate]:
        """The places of the mesh that are in this process."""
        return self.network.local

    def held(self) -> Iterator[Stage]:
        """The stages of all places here."""
        return (stage for place in self.places for stage in self.stages[place].values())
