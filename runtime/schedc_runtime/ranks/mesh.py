"""The arrangement of processes: which form a pipeline, share experts, split products, or are replicas."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.expert_group import ExpertGroup, in_process_expert_groups
from schedc_runtime.transport.collective_calls import Communicator
from schedc_runtime.transport.collectives import SoloCommunicator, TorchCommunicator, communicator_of
from schedc_runtime.transport.collectives_in_process import InProcessCommunicators
from schedc_runtime.transport.priorities import LANES, unknown
from schedc_runtime.transport.process_groups import join_groups


class Coordinate(NamedTuple):
    """The position of a process in the mesh: rank of its pipeline, number of the replica, and tensor rank."""

    pipeline: int
    replica: int
    tensor: int = 0


@dataclass(frozen=True)
class Mesh:
    """``experts * data`` pipelines of ``pipeline`` ranks each, every pipeline with its own batch.

    The ranks that hold the same stages are replicas. Parameters outside of experts lie on each replica, and their
    gradients are summed over all replicas. Groups of ``experts`` neighbouring replicas share the experts of their
    layers; each rank holds its part. An expert's gradients are summed over the ranks with the same part.

    With ``tensor`` ranks a replica is as many processes, which have one batch together. Process ``(pipeline rank *
    replicas + replica) * tensor + t`` of the world is tensor rank t. The processes with the same stages are peers, in
    this order. Tensor ranks are neighbours among them, and so are the ranks of an expert group, which spans tensor
    ranks. One of ``experts`` and ``tensor`` then divides the other, and there are ``data`` times the larger one peers.

    per_node: number of ranks of an expert group in one node; 0: all of them.
    shard_dense: shard parameters outside of experts over the replicas with FSDP2. Between steps parameters, gradients
        and the optimizer's state are DTensors. A stage's parameters are gathered while the stage works.
    high_priority: lanes whose collectives run on streams of high priority on a GPU, see `priorities.LANES`; by default
        none.
    tensor: ranks that split the products of a layer (tensor parallelism). Experts are never split.
    context: neighbouring replicas that share each sequence (context parallelism); each has its own tokens as its batch.
    """

    pipeline: int
    experts: int = 1
    data: int = 1
    per_node: int = 0
    shard_dense: bool = False
    high_priority: tuple[str, ...] = ()
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if min(self.pipeline, self.experts, self.data, self.tensor) < 1 or self.per_node < 0:
            raise RuntimeFault(f"{self} has an axis without ranks", "every axis has at least one rank")
        if max(self.experts, self.tensor) % min(self.experts, self.tensor):
            raise RuntimeFault(
                f"{self.experts} ranks share the experts, {self.tensor} split products, and neither divides the other",
                "choose expert ranks that fill whole groups of tensor ranks, or that fit into one",
            )
        if self.context < 1 or self.replicas % self.context:
            raise RuntimeFault(
                f"{self.context} context ranks among {self.replicas} replicas",
                "choose a number that divides the replicas, and context=1 without context parallelism",
            )
        sharing = self.context * self.tensor
        if max(self.experts, sharing) % min(self.experts, sharing):
            raise RuntimeFault(
                f"{self.experts} ranks share the experts, {sharing} share sequences, and neither divides the other",
                "choose expert ranks that fill whole groups of context ranks, or that fit into one",
            )
        if self.experts % (self.per_node or self.experts):
            raise RuntimeFault(
                f"{self.experts} ranks share the experts, {self.per_node} in each node, which does not divide them",
                "choose a number of expert ranks that fills whole nodes, or that fits into one",
            )
        if isinstance(self.high_priority, str) or (wrong := unknown(self.high_priority)):
            wrong = [self.high_priority] if isinstance(self.high_priority, str) else wrong
            raise RuntimeFault(f"high_priority of `{wrong[0]}`", f"give a tuple of lanes: {', '.join(LANES)}")
        self.refuse_beside_splits({"shard_dense": self.shard_dense})

    @classmethod
    def of_environment(cls, pipeline: int, experts: int = 1, tensor: int = 1, context: int = 1) -> Mesh:
        """The mesh of all processes that torchrun started. Data parallelism takes what the other axes leave.

        ``LOCAL_WORLD_SIZE`` neighbouring processes share a node. Raises `RuntimeFault` if the sizes do not divide the
        number of processes.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        least = pipeline * max(experts, tensor)
        if world % least:
            split = f", and {tensor} tensor ranks" if tensor > 1 else ""
            raise RuntimeFault(
                f"{world} processes cannot be {pipeline} pipeline ranks times {experts} expert ranks{split}",
                f"start a multiple of {least} processes{surplus(world - least)}",
            )
        return cls(pipeline, experts, world // least, min(experts, local), tensor=tensor, context=context)

    @classmethod
    def of_device_mesh(cls, device_mesh: Any) -> Mesh:
        """The mesh of torch's ``DeviceMesh`` over all processes: its axes are ``pp``, ``dp``, ``cp``, ``tp``, in order.

        An axis that is left out has one rank. Raises `RuntimeFault` for other axes, and for processes in another order.
        """
        names, ranks = tuple(device_mesh.mesh_dim_names or ()), device_mesh.mesh
        axes = [name for name in ("pp", "dp", "cp", "tp") if name in names]
        if list(names) != axes:
            raise RuntimeFault(
                f"a device mesh with the axes {', '.join(names) or 'without names'}",
                'name them "pp", "dp", "cp" and "tp", in this order: the ranks of the last axis are neighbours',
            )
        if ranks.flatten().tolist() != list(range(ranks.numel())):
            raise RuntimeFault(
                "the device mesh has the processes in another order than that of their numbers, or not all of them",
                'make it with init_device_mesh(device, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))',
            )
        size = dict(zip(names, ranks.shape, strict=True))
        context = size.get("cp", 1)
        return cls(size.get("pp", 1), data=size.get("dp", 1) * context, tensor=size.get("tp", 1), context=context)

    @property
    def splits(self) -> str:
        """What splits products or sequences, in words: tensor or context ranks; "" for neither."""
        sizes = {"tensor": self.tensor, "context": self.context}
        return next((f"{size} {kind} ranks" for kind, size in sizes.items() if size > 1), "")

    def refuse_beside_splits(self, asked: Mapping[str, bool]) -> None:
        """Raise `RuntimeFault` for the first thing that is asked for, by name, beside tensor or context ranks."""
        if self.splits and (taken := next((name for name, chosen in asked.items() if chosen), "")):
            raise RuntimeFault(
                f"{self.splits} and {taken}, which a pipeline does not carry out together", "leave one of the two out"
            )

    @property
    def replicas(self) -> int:
        """Number of pipelines with a batch of their own."""
        return self.sharing_replicas * self.data

    @property
    def sharing_replicas(self) -> int:
        """Number of replicas whose ranks make one expert group, or a part of one."""
        return max(1, self.experts // self.tensor)

    @property
    def expert_groups(self) -> int:
        """Number of groups of peers that hold all experts once."""
        return self.peers // self.experts

    @property
    def peers(self) -> int:
        """Number of processes that hold the same stages, or parts of them: replicas times tensor ranks."""
        return self.replicas * self.tensor

    def calls(self, parts: int) -> int:
        """Number of calls of `Pipeline.step` in which each replica takes its share of an update's batch of ``parts``.

        A replica takes one part in each call. The number is for ``accumulate``: with fewer replicas it is larger
        and the batch stays. Replica r takes part ``call * replicas + r``. Raises `RuntimeFault`, with the numbers of
        processes that work, if the replicas do not divide the parts.
        """
        if parts < 1 or parts % self.replicas:
            fitting = [data for data in range(1, parts + 1) if parts % (data * self.sharing_replicas) == 0]
            sizes = ", ".join(str(self.pipeline * self.exchanging * data) for data in fitting)
            raise RuntimeFault(
                f"{parts} parts of a batch cannot be shared by {self.replicas} replicas",
                f"start one of these numbers of processes: {sizes}"
                if sizes
                else f"give a multiple of {self.sharing_replicas}",
            )
        return parts // self.replicas

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.peers

    def process(self, coordinate: Coordinate) -> int:
        """The rank in the world of the process at ``coordinate``."""
        return (coordinate.pipeline * self.replicas + coordinate.replica) * self.tensor + coordinate.tensor

    def coordinate(self, process: int) -> Coordinate:
        """The coordinate of a process of the world."""
        position, tensor = divmod(process, self.tensor)
        return Coordinate(*divmod(position, self.replicas), tensor)

    def name(self, coordinate: Coordinate) -> str:
        """The name of a rank in errors, such as ``rank 0`` or ``rank 0 of replica 1, tensor rank 1``."""
        replica = f" of replica {coordinate.replica}" if self.replicas > 1 else ""
        return f"rank {coordinate.pipeline}{replica}" + f", tensor rank {coordinate.tensor}" * (self.tensor > 1)

    @property
    def names(self) -> list[str]:
        """[size] the names of all processes, in order."""
        return [self.name(self.coordinate(process)) for process in range(self.size)]

    @property
    def exchanging(self) -> int:
        """Number of neighbours that exchange something inside of layers: expert ranks, or tensor ranks."""
        return max(self.experts, self.tensor)

    def peer(self, coordinate: Coordinate) -> int:
        """The number of a process among those with the same stages."""
        return coordinate.replica * self.tensor + coordinate.tensor

    def pipelines(self) -> Iterator[list[int]]:
        """[peers][pipeline] the processes of each pipeline."""
        return ([rank * self.peers + peer for rank in range(self.pipeline)] for peer in range(self.peers))

    def replicas_of(self, coordinate: Coordinate) -> list[int]:
        """[peers] the processes that hold the same stages, in order, ``coordinate`` included: all tensor ranks of all
        replicas."""
        first = coordinate.pipeline * self.peers
        return list(range(first, first + self.peers))

    def sharing(self, coordinate: Coordinate) -> list[int]:
        """[experts] the processes that share experts with ``coordinate``, in order."""
        first = self.peer(coordinate) // self.experts * self.experts
        return self.replicas_of(coordinate)[first : first + self.experts]

    def holding_the_same(self, coordinate: Coordinate) -> list[int]:
        """[expert groups] the processes that hold the same part of experts, in order."""
        return self.replicas_of(coordinate)[self.peer(coordinate) % self.experts :: self.experts]

    def splitting_the_same(self, coordinate: Coordinate) -> list[int]:
        """[replicas] the processes that hold the same part of split products, in order."""
        return self.replicas_of(coordinate)[coordinate.tensor :: self.tensor]

    def sharing_sequences(self, coordinate: Coordinate) -> list[int]:
        """[context] the processes that share sequences with ``coordinate``, in order."""
        first = coordinate.replica - coordinate.replica % self.context
        return [self.process(coordinate._replace(replica=first + rank)) for rank in range(self.context)]

    def splitting(self, coordinate: Coordinate) -> list[int]:
        """[tensor] the processes that split products with ``coordinate``, in order."""
        first = self.process(coordinate._replace(tensor=0))
        return list(range(first, first + self.tensor))


def surplus(more: int) -> str:
    """What to add to a remedy where so many ``more`` processes were started than take part; "" without torchrun."""
    if more <= 0 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return "; with a fixed number in torchrun --nnodes, a further node waits for the place of a lost one"


@dataclass(frozen=True)
class PeerGroups:
    """The groups with which a rank communicates besides its pipeline.

    experts: the expert group of the rank. table: the other groups by name, those of `_GROUPS`.
    """

    experts: ExpertGroup
    table: Mapping[str, Communicator]

    @property
    def replicas(self) -> Communicator:
        """All ranks with the same stages, tensor ranks included."""
        return self.table["replicas"]

    @property
    def same_experts(self) -> Communicator:
        """The ranks with the same part of the experts."""
        return self.table["same experts"]

    @property
    def same_products(self) -> Communicator:
        """The ranks with the same part of split products: all replicas where none are split."""
        return self.table.get("same products", self.replicas)

    @property
    def tensor(self) -> Communicator:
        """The ranks that split the products of a layer."""
        return self.table["tensor"]

    @property
    def context(self) -> ExpertGroup:
        """The ranks that share sequences, as a group of exchanges. Nodes are as large as those of experts."""
        context, near = self.table["context"], self.experts.per_node
        return _as_group(context, -(-self.tensor.size * context.size // near) if self.experts.nodes > 1 else 1)

    @property
    def splitting(self) -> ExpertGroup:
        """The ranks that split products, as the group of an exchange. They lie in one node."""
        return _as_group(self.tensor)

    @property
    def inside_layers(self) -> ExpertGroup:
        """The larger group of the two that exchange something inside of layers: for experts, and for split products."""
        return self.splitting if self.tensor.size > self.experts.size else self.experts

    def close(self) -> None:
        """Give up the collectives in flight, and so wake waiting ranks."""
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
        return group.expert, group.rail, group.node, *self.table.values()


def _as_group(ranks: Communicator, nodes: int = 1) -> ExpertGroup:
    """The group of an exchange that takes ``ranks``, which lie in so many nodes, at once."""
    nodes = nodes if ranks.size % nodes == 0 else ranks.size
    return ExpertGroup(
        ranks, SoloCommunicator("rail"), SoloCommunicator("node"), nodes, ranks.size // nodes, ranks.rank
    )


_GROUPS = {
    "replicas": Mesh.replicas_of,
    "same experts": Mesh.holding_the_same,
    "tensor": Mesh.splitting,
    "same products": Mesh.splitting_the_same,
    "context": Mesh.sharing_sequences,
}
"""By name: the members of a rank's group, in the order in which all processes make the groups."""


def no_peers() -> PeerGroups:
    """The groups in a mesh without peers: each holds one rank."""
    return PeerGroups(ExpertGroup.solo(), {name: SoloCommunicator(name) for name in _GROUPS})


def peer_groups(mesh: Mesh, coordinate: Coordinate, timeout: float) -> PeerGroups:
    """The groups of this process, over torch.distributed. A collective over all processes of the mesh.

    timeout: seconds that a wait in a group may take.
    """
    coordinates = [mesh.coordinate(process) for process in range(mesh.size)]
    parts = {
        name: list(dict.fromkeys(tuple(among(mesh, each)) for each in coordinates))
        for name, among in _GROUPS.items()
        if name != "same products" or mesh.tensor > 1
    }
    per_node = mesh.per_node or mesh.experts
    high = mesh.high_priority
    sharing = list(dict.fromkeys(tuple(mesh.sharing(each)) for each in coordinates))
    experts = ExpertGroup.solo() if mesh.experts == 1 else ExpertGroup.of(sharing, per_node, timeout, high)
    table = {
        name: communicator_of(join_groups(groups, timeout, name in high), timeout, name)
        for name, groups in parts.items()
    }
    return PeerGroups(experts, table)


def in_process_peer_groups(mesh: Mesh) -> dict[Coordinate, PeerGroups]:
    """The groups of every coordinate, all in this process. Raises `RuntimeFault` for tensor and context ranks."""
    if mesh.splits:
        raise RuntimeFault(
            f"in_process=True and {mesh.splits}: one model cannot hold the parts of several",
            "start a process for each rank",
        )
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
                table = {"replicas": everyone.member(coordinate.replica), "same experts": part}
                groups[coordinate] = PeerGroups(group, table | {"tensor": SoloCommunicator("tensor")})
    return groups
