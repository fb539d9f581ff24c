"""The state that one stage's works among replicas act on: gradient sums, and sharded dense parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.ir.program import Instruction, InstructionKind, Program
from schedc.ir.works import WorkGroup, WorkKind, Works
from schedc_runtime.data_parallel.gradient_sums import StageSums, is_dense_shard, is_expert, is_summed_among_same
from schedc_runtime.data_parallel.hot_returns import trained_by
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.operands import ReplicaKey, replica_keys
from schedc_runtime.ranks.mesh import Coordinate, Mesh, PeerGroups
from schedc_runtime.stage.stage import Stage


class StageShards(Protocol):
    """The sharded parameters of a stage (`schedc_runtime.data_parallel.fsdp.DenseShards`)."""

    def ready(self) -> bool: ...

    def start_gather(self) -> int: ...

    def join_gather(self) -> None: ...

    def drop(self) -> None: ...

    def start_reduce(self) -> int: ...

    def join_reduce(self) -> None: ...

    def reset(self) -> None: ...


class StageReplicas:
    """Sums of a stage over one group of replicas, and its shards if these take part."""

    def __init__(self, index: int, sums: StageSums, shards: StageShards | None = None) -> None:
        self.index, self.sums, self.shards = index, sums, shards

    @property
    def members(self) -> int:
        """Number of replicas that take part."""
        return self.sums.communicator.size

    def ready(self) -> bool:
        """Whether the next join would not block."""
        return self.sums.ready() and (self.shards is None or self.shards.ready())

    def start_gather(self) -> int:
        """Start making the sharded parameters whole; returns their bytes."""
        return 0 if self.shards is None else self.shards.start_gather()

    def join_gather(self) -> None:
        """Let the stage compute on whole parameters."""
        if self.shards is not None:
            self.shards.join_gather()

    def drop(self) -> None:
        """Free the whole parameters."""
        if self.shards is not None:
            self.shards.drop()

    def start_scatter(self) -> int:
        """Send the replicas the gradients that they sum; returns the bytes of the gradients."""
        size = self.sums.start_scatter()
        return size if self.shards is None else size + self.shards.start_reduce()

    def join_scatter(self) -> None:
        """Add up this replica's share of the sums."""
        self.sums.join_scatter()
        if self.shards is not None:
            self.shards.join_reduce()

    def start_spread(self) -> int:
        """Send the replicas the sums of parameters that are not sharded; returns the bytes of these."""
        return self.sums.start_spread()

    def join_spread(self) -> None:
        """Put the sums in place of the gradients."""
        self.sums.join_spread()

    def reset(self) -> None:
        """Forget the step."""
        self.sums.reset()


class StageBytes(NamedTuple):
    """Bytes of a stage that works among replicas move: columns of `ReplicaBytes` in `schedc.step.works`."""

    summed: float = 0.0
    expert_summed: float = 0.0
    sharded: float = 0.0
    last: float = 0.0


@dataclass(frozen=True)
class SummedStage:
    """The parameters that a stage brings into the sums over its replicas: now, and behind the REDUCEs of its rank.

    copied: whether another rank holds the stage, too. All of its parameters are then late.
    """

    index: int
    copied: bool
    now: list[nn.Parameter] = field(default_factory=list)
    late: list[nn.Parameter] = field(default_factory=list)


def summed_stages(
    stream: Iterable[Instruction], modules: Mapping[int, nn.Module], tied: Iterable[nn.Parameter] = ()
) -> list[SummedStage]:
    """What each stage of a rank brings into the sums. modules: by stage. tied: parameters tied to other ranks' stages.

    A parameter that several stages of the rank share belongs to the one whose weight gradients are complete last. Late
    are stages with a second copy, and tied parameters.
    """
    last: dict[int, int] = {}
    copied: set[int] = set()
    exchanged = False
    for position, x in enumerate(stream):
        if x.kind is InstructionKind.REDUCE:
            exchanged = exchanged or x.is_tied
            copied |= set() if x.is_tied else {x.stage}
        elif (stage := trained_by(x)) >= 0:
            last[stage] = position
    apart = set(map(id, tied)) if exchanged else set()
    taken: set[int] = set()
    summed = []
    for stage in sorted(last, key=lambda stage: -last[stage]):
        of_stage = SummedStage(stage, stage in copied)
        for parameter in modules[stage].parameters():
            if id(parameter) not in taken:
                taken.add(id(parameter))
                late = of_stage.copied or id(parameter) in apart
                (of_stage.late if late else of_stage.now).append(parameter)
        summed.append(of_stage)
    return summed


def stage_replicas(
    stream: Iterable[Instruction],
    stages: Mapping[int, Stage],
    peer_groups: PeerGroups,
    tied: Iterable[nn.Parameter] = (),
    shards: Mapping[int, StageShards] | None = None,
) -> dict[ReplicaKey, StageReplicas]:
    """What the works among replicas in a rank's stream run on. stages, shards: of the rank, by stage."""
    replicas: dict[ReplicaKey, StageReplicas] = {}
    members = {WorkGroup.REPLICAS: peer_groups.replicas, WorkGroup.SAME_EXPERTS: peer_groups.same_products}
    modules = {index: stage.module for index, stage in stages.items()}
    for summed in summed_stages(stream, modules, tied):
        for parameters, late in ((summed.now, False), (summed.late, True)):
            for group, communicator in members.items():
                mine = [parameter for parameter in parameters if group_of_replicas(parameter) is group]
                sums = StageSums(mine, communicator, peer_groups.same_experts)
                if sums.travel:
                    replicas[ReplicaKey(summed.index, int(group), late)] = StageReplicas(summed.index, sums)
    for index, of_stage in (shards or {}).items():
        key = ReplicaKey(index, int(WorkGroup.REPLICAS), False)
        replicas.setdefault(key, StageReplicas(index, StageSums((), peer_groups.replicas))).shards = of_stage
    return replicas


def group_of_replicas(parameter: nn.Parameter) -> WorkGroup | None:
    """The replicas that sum a parameter's gradients by works of their own; None for a shard, which `StageShards` sum.

    Parts are summed among the ranks that hold the same ones.
    """
    if is_dense_shard(parameter):
        return None
    return WorkGroup.SAME_EXPERTS if is_summed_among_same(parameter) else WorkGroup.REPLICAS


def check_summed(replicas: Mapping[ReplicaKey, StageReplicas], stream: Iterable[Instruction], works: Works) -> None:
    """Raise `RuntimeFault` if gradients of a stage would not be summed: it was frozen when the works were placed."""
    keys = replica_keys(list(stream), works)
    scattered = {key for work, key in keys.items() if works.kind[work] == WorkKind.SCATTER}
    for key, of_stage in replicas.items():
        if key not in scattered and of_stage.sums.buckets:
            raise RuntimeFault(
                f"stage {of_stage.index} is trained now, and had nothing to train when the pipeline was built",
                "build the pipeline once its parameters are trained",
            )


def kept_whole(modules: Iterable[nn.Module], tied: Iterable[nn.Parameter] = ()) -> set[nn.Parameter]:
    """The parameters of a rank that are not sharded: experts, parameters of several stages, and tied ones."""
    uses = Counter(parameter for module in modules for parameter in set(module.parameters()))
    return {parameter for parameter, count in uses.items() if count > 1 or is_expert(parameter)} | set(tied)


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
    def take_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the shards, for the caller to leave behind a failure."""

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
