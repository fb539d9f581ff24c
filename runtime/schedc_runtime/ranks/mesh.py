"""The arrangement of processes: which form a pipeline, share the experts of its layers, or are replicas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.expert_group import ExpertGroup, in_process_expert_groups
from schedc_runtime.transport.collective_calls import Communicator
from schedc_runtime.transport.collectives import SoloCommunicator, TorchCommunicator, communicator_of
from schedc_runtime.transport.collectives_in_process import InProcessCommunicators
from schedc_runtime.transport.priorities import LANES, unknown
from schedc_runtime.transport.process_groups import join_groups


class Coordinate(NamedTuple):
    """The position of a process in the mesh: its rank in its pipeline, and the number of the replica."""

    pipeline: int
    replica: int


@dataclass(frozen=True)
class Mesh:
    """``experts * data`` pipelines of ``pipeline`` ranks each, every pipeline with its own batch.

    The ranks that hold the same stages are replicas. Parameters outside of experts lie on each replica, and their
    gradients are summed over all replicas. Groups of ``experts`` neighbouring replicas share the experts of their
    layers; each rank holds its part. An expert's gradients are summed over the ``data`` ranks with the same part.

    Process ``pipeline rank * replicas + replica`` of the world has replica ``d * experts + e``. An expert group
    therefore lies on neighbouring processes.

    per_node: number of ranks of an expert group in one node; 0: all of them.
    shard_dense: shard parameters outside of experts over the replicas with FSDP2. Between steps parameters, gradients
        and the optimizer's state are DTensors. They are gathered while their stage works.
    high_priority: lanes whose collectives run on streams of high priority on a GPU, see `priorities.LANES`; by default
        none.
    """

    pipeline: int
    experts: int = 1
    data: int = 1
    per_node: int = 0
    shard_dense: bool = False
    high_priority: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.pipeline, self.experts, self.data) < 1 or self.per_node < 0:
            raise RuntimeFault(f"{self} has an axis without ranks", "every axis has at least one rank")
        if self.experts % (self.per_node or self.experts):
            raise RuntimeFault(
                f"{self.experts} ranks share the experts, {self.per_node} in each node, which does not divide them",
                "choose a number of expert ranks that fills whole nodes, or that fits into one",
            )
        if isinstance(self.high_priority, str) or (wrong := unknown(self.high_priority)):
            wrong = [self.high_priority] if isinstance(self.high_priority, str) else wrong
            raise RuntimeFault(f"high_priority of `{wrong[0]}`", f"give a tuple of lanes: {', '.join(LANES)}")

    @classmethod
    def of_environment(cls, pipeline: int, experts: int = 1) -> Mesh:
        """The mesh of all processes that torchrun started. Data parallelism takes what the other two axes leave.

        ``LOCAL_WORLD_SIZE`` neighbouring processes share a node. Raises `RuntimeFault` if the sizes do not divide the
        number of processes.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        if world % (pipeline * experts):
            raise RuntimeFault(
                f"{world} processes cannot be {pipeline} pipeline ranks times {experts} expert ranks",
                f"start a multiple of {pipeline * experts} processes{surplus(world - pipeline * experts)}",
            )
        return cls(pipeline, experts, world // (pipeline * experts), min(experts, local))

    @property
    def replicas(self) -> int:
        return self.experts * self.data

    def calls(self, parts: int) -> int:
        """Number of calls of `Pipeline.step` in which each replica takes its share of an update's batch of ``parts``.

        A part is what one replica takes in one call. The number is for ``accumulate``: with fewer replicas it is larger
        and the batch stays. Replica r takes part ``call * replicas + r``. Raises `RuntimeFault`, with the numbers of
        processes that work, if the replicas do not divide the parts.
        """
        if parts < 1 or parts % self.replicas:
            fitting = [data for data in range(1, parts + 1) if parts % (data * self.experts) == 0]
            sizes = ", ".join(str(self.pipeline * self.experts * data) for data in fitting)
            raise RuntimeFault(
                f"{parts} parts of a batch cannot be shared by {self.replicas} replicas",
                f"start one of these numbers of processes: {sizes}" if sizes else f"give a multiple of {self.experts}",
            )
        return parts // self.replicas

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.replicas

    def process(self, coordinate: Coordinate) -> int:
        """The rank in the world of the process at ``coordinate``."""
        return coordinate.pipeline * self.replicas + coordinate.replica

    def coordinate(self, process: int) -> Coordinate:
        """The coordinate of a process of the world."""
        return Coordinate(*divmod(process, self.replicas))

    def name(self, coordinate: Coordinate) -> str:
        """The name of a rank in errors: ``rank 0``, or with replicas ``rank 0 of replica 1``."""
        return f"rank {coordinate.pipeline}" + (f" of replica {coordinate.replica}" if self.replicas > 1 else "")

    @property
    def names(self) -> list[str]:
        """[size] the names of all processes, in order."""
        return [self.name(self.coordinate(process)) for process in range(self.size)]

    def pipelines(self) -> Iterator[list[int]]:
        """[replicas][pipeline] the processes of each pipeline."""
        return (
            [self.process(Coordinate(rank, replica)) for rank in range(self.pipeline)]
            for replica in range(self.replicas)
        )

    def replicas_of(self, coordinate: Coordinate) -> list[int]:
        """[replicas] the processes that hold the same stages, in order of replica, ``coordinate`` included."""
        return [self.process(Coordinate(coordinate.pipeline, replica)) for replica in range(self.replicas)]

    def sharing(self, coordinate: Coordinate) -> list[int]:
        """[experts] the processes that share experts with ``coordinate``, in order."""
        first = coordinate.replica - coordinate.replica % self.experts
        return self.replicas_of(coordinate)[first : first + self.experts]

    def holding_the_same(self, coordinate: Coordinate) -> list[int]:
        """[data] the processes that hold the same part of the experts as ``coordinate``, in order."""
        return self.replicas_of(coordinate)[coordinate.replica % self.experts :: self.experts]


def surplus(more: int) -> str:
    """What to add to a remedy where so many ``more`` processes were started than take part; "" without torchrun."""
    if more <= 0 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return "; with a fixed number in torchrun --nnodes, a further node waits for the place of a lost one"


@dataclass(frozen=True)
class PeerGroups:
    """The groups with which a rank communicates besides its pipeline.

    experts: the ranks that share its experts. replicas: all ranks with the same stages. same_experts: the replicas with
    the same part of the experts.
    """

    experts: ExpertGroup
    replicas: Communicator
    same_experts: Communicator

    def close(self) -> None:
        """Give up the collectives in flight, which wakes the ranks that wait for this one."""
        for communicator in self._all():
            communicator.close()

    def limit_waits(self, seconds: float) -> None:
        """Limit each further wait in one of the groups to so many seconds."""
        for each in self._all():
            if isinstance(each, TorchCommunicator):
                each.limit_waits(seconds)

    def take_groups(self) -> list[dist.ProcessGroup]:
        """The process groups that are not closed, for the caller to leave."""
        return [group for each in self._all() if isinstance(each, TorchCommunicator) for group in each.take_group()]

    def _all(self) -> tuple[Communicator, ...]:
        group = self.experts
        return group.expert, group.rail, group.node, self.replicas, self.same_experts


def no_peers() -> PeerGroups:
    """The groups in a mesh without replicas: each holds one rank."""
    return PeerGroups(ExpertGroup.solo(), SoloCommunicator("replicas"), SoloCommunicator("same experts"))


def peer_groups(mesh: Mesh, coordinate: Coordinate, timeout: float) -> PeerGroups:
    """The groups of this process, over torch.distributed. A collective over all processes of the mesh.

    timeout: seconds that a wait in a group may take.
    """
    coordinates = [mesh.coordinate(process) for process in range(mesh.size)]
    sharing, replicas, same = (
        list(dict.fromkeys(tuple(among(each)) for each in coordinates))
        for among in (mesh.sharing, mesh.replicas_of, mesh.holding_the_same)
    )
    per_node = mesh.per_node or mesh.experts
    high = mesh.high_priority
    experts = ExpertGroup.solo() if mesh.experts == 1 else ExpertGroup.of(sharing, per_node, timeout, high)
    others = {"replicas": replicas, "same experts": same}
    return PeerGroups(
        experts,
        *(communicator_of(join_groups(parts, timeout, name in high), timeout, name) for name, parts in others.items()),
    )


def in_process_peer_groups(mesh: Mesh) -> dict[Coordinate, PeerGroups]:
    """The groups of every coordinate, all in this process."""
    groups: dict[Coordinate, PeerGroups] = {}
    high = mesh.high_priority
    for rank in range(mesh.pipeline):
        coordinates = [Coordinate(rank, replica) for replica in range(mesh.replicas)]
        everyone = InProcessCommunicators(mesh.replicas, "replicas", "replicas" in high)
        same = [InProcessCommunicators(mesh.data, "same experts", "same experts" in high) for _ in range(mesh.experts)]
        for first in range(0, mesh.replicas, mesh.experts):
            sharing = in_process_expert_groups(mesh.experts, mesh.per_node or mesh.experts, high)
            for coordinate, group in zip(coordinates[first : first + mesh.experts], sharing, strict=True):
                part = same[coordinate.replica % mesh.experts].member(coordinate.replica // mesh.experts)
                groups[coordinate] = PeerGroups(group, everyone.member(coordinate.replica), part)
    return groups
