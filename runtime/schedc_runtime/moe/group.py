"""The ranks that share the experts of a stage, seen as nodes of several ranks each."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.transport.collectives import (
    Communicator,
    InProcessCommunicators,
    SoloCommunicator,
    TorchCommunicator,
)


@dataclass(frozen=True)
class ExpertGroup:
    """One rank's place in its expert group. rank = node * per_node + position.

    expert: all ranks of the group. rail: the ranks in the same position of every node, in the order of nodes; what
    crosses nodes hierarchically goes here. node: the ranks of this rank's node, by position.
    """

    expert: Communicator
    rail: Communicator
    node: Communicator
    nodes: int = 1
    per_node: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def node_index(self) -> int:
        return self.rank // self.per_node

    @property
    def position(self) -> int:
        return self.rank % self.per_node

    @staticmethod
    def solo() -> ExpertGroup:
        """A rank that holds all experts itself."""
        return ExpertGroup(SoloCommunicator("expert"), SoloCommunicator("rail"), SoloCommunicator("node"))

    @staticmethod
    def of(group: dist.ProcessGroup, per_node: int, timeout: float) -> ExpertGroup:
        """This process' place in a process group whose consecutive ``per_node`` ranks share a node.

        Makes the groups of rails and nodes; only the members of each have to call, all of them at the same time.
        timeout: seconds that a wait for a collective may take.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        nodes = nodes_of(size, per_node)
        ranks = dist.get_process_group_ranks(group)
        node, position = divmod(rank, per_node)
        inside = ranks[node * per_node : (node + 1) * per_node]
        return ExpertGroup(
            expert=TorchCommunicator(group, timeout, "expert"),
            rail=_subgroup(ranks[position::per_node], f"rail {position}", timeout),
            node=_subgroup(inside, f"node {node}", timeout),
            nodes=nodes,
            per_node=per_node,
            rank=rank,
        )

    def bytes_leaving_node(self) -> int:
        """Payload that this rank has sent to ranks of other nodes so far."""
        mine = self.node_index
        away = sum(count for member, count in enumerate(self.expert.sent) if member // self.per_node != mine)
        return away + sum(count for node, count in enumerate(self.rail.sent) if node != mine)


def in_process_expert_groups(size: int, per_node: int) -> list[ExpertGroup]:
    """The places of all ranks of an expert group in one process; their communicators are cooperative."""
    nodes = nodes_of(size, per_node)
    everyone = InProcessCommunicators(size, "expert")
    rails = [InProcessCommunicators(nodes, f"rail {position}") for position in range(per_node)]
    insides = [InProcessCommunicators(per_node, f"node {node}") for node in range(nodes)]
    return [
        ExpertGroup(
            expert=everyone.member(rank),
            rail=rails[rank % per_node].member(rank // per_node),
            node=insides[rank // per_node].member(rank % per_node),
            nodes=nodes,
            per_node=per_node,
            rank=rank,
        )
        for rank in range(size)
    ]


def nodes_of(size: int, per_node: int) -> int:
    """How many nodes ``size`` ranks fill, ``per_node`` in each."""
    if per_node < 1 or size % per_node:
        raise RuntimeFault(
            f"an expert group of {size} ranks cannot be cut into nodes of {per_node}",
            "choose a number of ranks per node that divides the group",
        )
    return size // per_node


def _subgroup(ranks: list[int], name: str, timeout: float) -> Communicator:
    if len(ranks) == 1:
        return SoloCommunicator(name)
    # Other expert groups may exist and make theirs at other times, so only the members meet.
    made = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
    return TorchCommunicator(made, timeout, name)
