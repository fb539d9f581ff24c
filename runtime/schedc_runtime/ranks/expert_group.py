"""The groups of ranks that share the experts of a stage, as nodes of several ranks each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.transport.collective_calls import Communicator
from schedc_runtime.transport.collectives import SoloCommunicator, communicator_of
from schedc_runtime.transport.collectives_in_process import InProcessCommunicators
from schedc_runtime.transport.process_groups import join_groups


@dataclass(frozen=True)
class ExpertGroup:
    """The communicators of one rank in its expert group. rank = node * per_node + position.

    expert: all ranks of the group. rail: the ranks in the same position of every node, in the order of nodes;
    hierarchical methods cross nodes here. node: the ranks of this rank's node, by position.
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
        """The group of a rank that holds all experts itself."""
        return ExpertGroup(SoloCommunicator("expert"), SoloCommunicator("rail"), SoloCommunicator("node"))

    @staticmethod
    def of(groups: Sequence[Sequence[int]], per_node: int, timeout: float, high: Collection[str] = ()) -> ExpertGroup:
        """The expert group of this process. groups: processes of the world, ``per_node`` in a row in one node.

        timeout: seconds that a wait for a collective may take. A process in no group gets `solo`. high: lanes of
        high priority.

        A collective over all processes, which pass the same groups. It also makes the groups of rails and nodes.
        """
        process, nodes = dist.get_rank(), nodes_of(len(groups[0]), per_node)
        rails = [ranks[position::per_node] for ranks in groups for position in range(per_node)]
        inside = [ranks[node * per_node : (node + 1) * per_node] for ranks in groups for node in range(nodes)]
        lanes = {"comm": groups, "rail": rails, "node": inside}
        joined = [join_groups(parts, timeout, lane in high) for lane, parts in lanes.items()]
        own = next((ranks for ranks in groups if process in ranks), None)
        if own is None:
            return ExpertGroup.solo()
        node, position = divmod(list(own).index(process), per_node)
        names = ("expert", f"rail {position}", f"node {node}")
        expert, rail, inner = (communicator_of(group, timeout, name) for name, group in zip(names, joined, strict=True))
        return ExpertGroup(expert, rail, inner, nodes, per_node, node * per_node + position)

    def bytes_leaving_node(self) -> int:
        """Bytes of payload that this rank has sent to ranks of other nodes so far."""
        mine = self.node_index
        away = sum(count for member, count in enumerate(self.expert.sent) if member // self.per_node != mine)
        return away + sum(count for node, count in enumerate(self.rail.sent) if node != mine)


def in_process_expert_groups(size: int, per_node: int, high: Collection[str] = ()) -> list[ExpertGroup]:
    """[size] the ends of all ranks of an expert group in one process, with cooperative communicators.

    high: lanes of high priority.
    """
    nodes = nodes_of(size, per_node)
    everyone = InProcessCommunicators(size, "expert", "comm" in high)
    rails = [InProcessCommunicators(nodes, f"rail {position}", "rail" in high) for position in range(per_node)]
    insides = [InProcessCommunicators(per_node, f"node {node}", "node" in high) for node in range(nodes)]
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
    """Number of nodes that ``size`` ranks fill, ``per_node`` in each."""
    if per_node < 1 or size % per_node:
        raise RuntimeFault(
            f"an expert group of {size} ranks cannot be cut into nodes of {per_node}",
            "choose a number of ranks per node that divides the group",
        )
    return size // per_node
