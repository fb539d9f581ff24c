"""How processes are arranged: which form a pipeline, which share the experts of its layers, which are its replicas."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.expert_group import ExpertGroup, in_process_expert_groups
from schedc_runtime.transport.collectives import (
    Communicator,
    InProcessCommunicators,
    SoloCommunicator,
    TorchCommunicator,
)
from schedc_runtime.transport.process_groups import join_groups


class Coordinate(NamedTuple):
    """Where a process sits: its rank in its pipeline, and which replica of the pipeline that is."""

    pipeline: int
    replica: int


@dataclass(frozen=True)
class Mesh:
    """Pipelines of ``pipeline`` ranks, ``experts * data`` of them side by side, each with a batch of its own.

    The ranks that hold the same stages are replicas: what is not an expert lies on each of them, and its gradients are
    summed over all. Of those, ``experts`` neighbours share the experts of their layers, each holding its part of them:
    an expert's gradients are summed over the ``data`` ranks that hold the same part.

    Process ``pipeline rank * replicas + replica`` of the world, so that an expert group lies on neighbouring processes;
    replica ``d * experts + e``.

    per_node: how many ranks of an expert group lie in one node; 0: all of them.
    shard_dense: spread what is not an expert over the replicas with FSDP2. Parameters, their gradients and so the
        optimizer's state are DTensors between steps, gathered while their stage works.
    """

    pipeline: int
    experts: int = 1
    data: int = 1
    per_node: int = 0
    shard_dense: bool = False

    def __post_init__(self) -> None:
        if min(self.pipeline, self.experts, self.data) < 1 or self.per_node < 0:
            raise RuntimeFault(f"{self} has an axis without ranks", "every axis has at least one rank")
        if self.experts % (self.per_node or self.experts):
            raise RuntimeFault(
                f"{self.experts} ranks share the experts, {self.per_node} in each node, which does not divide them",
                "choose a number of expert ranks that fills whole nodes, or that fits into one",
            )

    @classmethod
    def of_environment(cls, pipeline: int, experts: int = 1) -> Mesh:
        """The mesh of all processes that torchrun started; replicas fill what the other two axes leave.

        Neighbouring processes share a node, ``LOCAL_WORLD_SIZE`` of them. Raises `RuntimeFault` if the sizes do not
        divide the number of processes.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        if world % (pipeline * experts):
            raise RuntimeFault(
                f"{world} processes cannot be {pipeline} pipeline ranks times {experts} expert ranks",
                f"start a multiple of {pipeline * experts} processes",
            )
        return cls(pipeline, experts, world // (pipeline * experts), min(experts, local))

    @property
    def replicas(self) -> int:
        return self.experts * self.data

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.replicas

    def process(self, place: Coordinate) -> int:
        """The rank in the world of the process that sits there."""
        return place.pipeline * self.replicas + place.replica

    def coordinate(self, process: int) -> Coordinate:
        """Where a process of the world sits."""
        return Coordinate(*divmod(process, self.replicas))

    def name(self, place: Coordinate) -> str:
        """What errors call the rank that sits there: ``rank 0``, and with replicas ``rank 0 of replica 1``."""
        return f"rank {place.pipeline}" + (f" of replica {place.replica}" if self.replicas > 1 else "")

    @property
    def names(self) -> list[str]:
        """Of its processes, in order."""
        return [self.name(self.coordinate(process)) for process in range(self.size)]

    def pipelines(self) -> Iterator[list[int]]:
        """The processes of each pipeline, by replica."""
        return (
            [self.process(Coordinate(rank, replica)) for rank in range(self.pipeline)]
            for replica in range(self.replicas)
        )

    def replicas_of(self, place: Coordinate) -> list[int]:
        """The processes that hold the same stages, in order of replica: ``place`` among them."""
        return [self.process(Coordinate(place.pipeline, replica)) for replica in range(self.replicas)]

    def sharing(self, place: Coordinate) -> list[int]:
        """The processes that share the experts of ``place``, in order."""
        first = place.replica - place.replica % self.experts
        return self.replicas_of(place)[first : first + self.experts]

    def holding_the_same(self, place: Coordinate) -> list[int]:
        """The processes that hold the same part of the experts as ``place``, in order."""
        return self.replicas_of(place)[place.replica % self.experts :: self.experts]


@dataclass(frozen=True)
class PeerGroups:
    """Whom the stages of one place speak to beside their pipeline.

    experts: those that share its experts. replicas: all that hold the same stages; same_experts: those of them that
    hold the same part of the experts.
    """

    experts: ExpertGroup
    replicas: Communicator
    same_experts: Communicator

    def close(self) -> None:
        """Give up what is under way with them, which wakes those that wait for this rank."""
        group = self.experts
        for communicator in (group.expert, group.rail, group.node, self.replicas, self.same_experts):
            communicator.close()


def no_peers() -> PeerGroups:
    """The neighbours of a pipeline without replicas: none."""
    return PeerGroups(ExpertGroup.solo(), SoloCommunicator("replicas"), SoloCommunicator("same experts"))


def peer_groups(mesh: Mesh, place: Coordinate, timeout: float) -> PeerGroups:
    """The neighbours of this process, over torch.distributed. A collective over all processes of the mesh."""
    places = [mesh.coordinate(process) for process in range(mesh.size)]
    sharing, replicas, same = (
        list(dict.fromkeys(tuple(among(each)) for each in places))
        for among in (mesh.sharing, mesh.replicas_of, mesh.holding_the_same)
    )
    per_node = mesh.per_node or mesh.experts
    experts = ExpertGroup.solo() if mesh.experts == 1 else ExpertGroup.of(sharing, per_node, timeout)
    return PeerGroups(
        experts, _communicator("replicas", replicas, timeout), _communicator("same experts", same, timeout)
    )


def _communicator(name: str, parts: Sequence[Sequence[int]], timeout: float) -> Communicator:
    group = join_groups(parts, timeout)
    return SoloCommunicator(name) if group is None else TorchCommunicator(group, timeout, name)


def in_process_peer_groups(mesh: Mesh) -> dict[Coordinate, PeerGroups]:
    """The neighbours of every place, all in this process."""
    found: dict[Coordinate, PeerGroups] = {}
    for rank in range(mesh.pipeline):
        places = [Coordinate(rank, replica) for replica in range(mesh.replicas)]
        everyone = InProcessCommunicators(mesh.replicas, "replicas")
        same = [InProcessCommunicators(mesh.data, "same experts") for _ in range(mesh.experts)]
        for first in range(0, mesh.replicas, mesh.experts):
            sharing = in_process_expert_groups(mesh.experts, mesh.per_node or mesh.experts)
            for place, group in zip(places[first : first + mesh.experts], sharing, strict=True):
                part = same[place.replica % mesh.experts].member(place.replica // mesh.experts)
                found[place] = PeerGroups(group, everyone.member(place.replica), part)
    return found
