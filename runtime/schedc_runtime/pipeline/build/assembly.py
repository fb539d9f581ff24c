"""What a pipeline consists of: the value that the steps of `assemble` set piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from schedc.cell import CellCosts
from schedc.cell.issue_order import CellOnRank
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc.plan.layout.parts import Layout
from schedc_runtime.data_parallel.stage_replicas import Sharding, StageBytes
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.moe.kernels import Kernels
from schedc_runtime.partition import Partition
from schedc_runtime.partition.shared import SharedParameter
from schedc_runtime.pipeline.agree.guard import FailureGuard
from schedc_runtime.pipeline.agree.plan_fit import FirstBatch
from schedc_runtime.pipeline.agree.rows import Dim, Dims, dims_of
from schedc_runtime.pipeline.build.bound import BoundCode
from schedc_runtime.pipeline.build.chunked_loss import LossOfMicrobatch
from schedc_runtime.pipeline.build.loss_function import LossHead
from schedc_runtime.pipeline.build.own_works import OwnWorks
from schedc_runtime.pipeline.build.stages import StagesByIndex
from schedc_runtime.pipeline.build.tied import TiedWeights
from schedc_runtime.providers import NOBODY_NAMED, NamedProviders
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.ranks.network import Network
from schedc_runtime.stage.stage import Stage

if TYPE_CHECKING:
    from schedc_runtime.compiled.settings import CompileSettings
    from schedc_runtime.compiled.units import CompiledUnits
    from schedc_runtime.fusion.fused_stages import FusedStages
    from schedc_runtime.fusion.norms import ProvidedNorms
    from schedc_runtime.materialize.construction import Construction
    from schedc_runtime.offload.lanes import Lanes
    from schedc_runtime.tensor_parallel.split_model import SplitProducts


@dataclass(frozen=True)
class Cut:
    """Where a model is cut; by default into stages of equal numbers of parameters. See `partition`.

    costs: [blocks] or [blocks + 2] what each block costs, in any unit; the largest stage is made as small as can be.
    split_points: [stages - 1] names of the blocks that begin stage 1, 2, ...
    layers: which parts of the model each stage has; by default the layout that the program was compiled with.
    blocks: name of the list whose elements are the blocks; by default the largest.
    inputs: names of the forward's arguments that a batch brings; by default those without a default value.
    segmented: run stages in segments, in the order of cell programs, even in a model without expert layers.
    graphs: capture the launches of segments with static shapes once, and replay them (`captured`). ``"step"``: capture
        whole steps instead (`step_graphs`).
    release_others: free the memory of the stages that other ranks hold. The model is then no longer whole.
    """

    costs: Sequence[float] | None = None
    split_points: Sequence[str] | None = None
    layers: Layout | None = None
    blocks: str | None = None
    inputs: Sequence[str] | None = None
    segmented: bool = False
    graphs: bool | str = False
    release_others: bool = False


class _Kind(NamedTuple):
    """fits: whether a value is of the kind. what: the kind, for messages."""

    fits: Callable[[Any], bool]
    what: str
    remedy: str


def _optional(kind: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kind)


_KINDS = {
    "model": _Kind(lambda value: isinstance(value, nn.Module), "an nn.Module", "pass the model itself, constructed"),
    "program": _Kind(
        lambda value: isinstance(value, Program), "a compiled program", "write schedc.compile('zbh1', P=4, M=8)"
    ),
    "loss_fn": _Kind(
        lambda value: value is None or callable(value) or isinstance(value, (tuple, list)),
        "a function",
        "pass loss_fn(output, target), a tuple with one for each output, or None",
    ),
    "count_fn": _Kind(callable, "a function", "pass count_fn(targets), or leave it out"),
    "cut": _Kind(_optional(Cut), "a Cut", "write cut=Cut(split_points=[...])"),
    "others": _Kind(
        lambda value: isinstance(value, (tuple, list)) and all(isinstance(each, Program) for each in value),
        "a list of compiled programs",
        "write others=[schedc.compile('zbv', P=4, M=8)]",
    ),
    "mesh": _Kind(_optional(Mesh), "a Mesh", "write mesh=Mesh(pipeline, data=replicas)"),
}
"""By argument."""


def check_kinds(**arguments: Any) -> None:
    """Raise `RuntimeFault` for the first argument that is of another kind than it must be."""
    for name, value in arguments.items():
        kind = _KINDS[name]
        if not kind.fits(value):
            shown = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            raise RuntimeFault(f"{name} is {shown}, not {kind.what}", kind.remedy)


@dataclass(frozen=True)
class Settings:
    """The arguments of a `Pipeline`, with defaults. timeout: seconds."""

    model: nn.Module
    program: Program
    loss_fn: LossOfMicrobatch | Sequence[LossOfMicrobatch] | None
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
    providers: NamedProviders = NOBODY_NAMED
    tensor_plan: Mapping[str, str] | None = None
    others: tuple[Program, ...] = ()

    @cached_property
    def dims(self) -> Dims:
        """The dimensions of the rows of a batch's tensors. Raises `RuntimeFault` for what is none."""
        return dims_of(self.model, self.example_dims, self.cut.inputs)


@dataclass
class Assembly:
    """What a pipeline consists of; each step of `STEPS` in `schedc_runtime.pipeline.build.assemble` sets some.

    program: from the settings; from `tie_weights` on with the sums of tied weights, from `place_works` on with the
    works among replicas. own: the program without these works, and the works that it was compiled with.
    stage_bytes: bytes in works, by stage.
    construction: where the values of each of the model's tensors come from. has_values: whether all tensors here were
    seen off the meta device.
    first_batch: compares the plan's tokens with it. names: shape and dtype of each entry of the model's state.
    shards: shards of the dense parts, where these are sharded. tied: the parameters of which several ranks need a copy.
    weights: the copies that are here.
    head: the loss function of the last stages. stages: stages of each place in this process, by index.
    copied: stages here with a copy on another rank. compile: settings of compiled units. compiled: the units, if any.
    fused: blocks with fused chains, if any. norms: RMSNorms that a provider computes, if any.
    split: the model's split products, if the mesh has tensor ranks.
    lanes: where offloads and fetches run, of each place here whose program has some.
    cells: the order inside each kind of instruction on segmented stages, of this process's first replica.
    fixed: why training steps must have the program's own number of microbatches, if anything asks for that.
    """

    settings: Settings
    construction: Construction = field(init=False)
    has_values: bool = False
    device: torch.device = field(init=False)
    plan: Plan = field(init=False)
    mesh: Mesh = field(init=False)
    network: Network = field(init=False)
    program: Program = field(init=False)
    own: OwnWorks = field(init=False)
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
    norms: ProvidedNorms | None = None
    split: SplitProducts | None = None
    lanes: list[Lanes] = field(default_factory=list)
    cell_source: CellSource = field(init=False)
    cells: dict[str, CellOnRank] = field(init=False)
    fixed: list[str] = field(default_factory=list)
    bound_code: BoundCode = field(init=False)
    guard: FailureGuard = field(init=False)

    @property
    def places(self) -> list[Coordinate]:
        """The places of the mesh that are in this process."""
        return self.network.local

    def held(self) -> Iterator[Stage]:
        """The stages of all places here."""
        return (stage for place in self.places for stage in self.stages[place].values())

    @property
    def forms_loss(self) -> bool:
        """Whether a stage here forms a loss."""
        return any(map(self.holds, self.partition.losses))

    def holds(self, index: int) -> bool:
        """Whether stage ``index`` is here."""
        return any(index in held for held in self.stages.values())
