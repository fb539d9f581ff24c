"""The inside of a stage as a graph of segments and exchanges: the input of cell programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache

from schedc.diagnostics import CompilerBug


class Lane(StrEnum):
    """The resource that a node occupies while it runs. Messages between stages have none: they are outside of cells."""

    COMPUTE = "compute"
    RAIL = "rail"
    """The links between nodes: one exchange at a time."""
    NODE = "node"
    """The links inside a node: one exchange at a time."""
    HOST = "host"
    """The way to the host and back, which no other rank takes: one copy of sizes at a time."""


LINKS = (Lane.RAIL, Lane.NODE)
"""The lanes that ranks share."""
EXCHANGE_LANES = (*LINKS, Lane.HOST)
LANES = (*EXCHANGE_LANES, Lane.COMPUTE)
COUNTS = "counts"
"""The queue of small exchanges on communicators that no rows use: of the balance, and of `COUNTING` if rows take two
hops."""
COUNTING = frozenset({"routing", "distinct"})
"""Roles of exchanges of numbers of rows, among all ranks of a group."""
TENSOR_EXCHANGES = ("gather", "scatter", "sum", "enter", "collect", "feature")
"""Roles of exchanges among tensor ranks: rows to a core and back, what they look up, own rows, logits, columns."""
CONTEXT_EXCHANGES = ("keys",)
"""Roles of exchanges among context ranks: keys and values."""
SPLITTING = frozenset((*TENSOR_EXCHANGES, *CONTEXT_EXCHANGES))
"""Roles of exchanges among ranks that share products or sequences, and no experts."""
QUEUES = (*LANES, COUNTS)
"""The queues of a rank. In each, one segment or exchange runs at a time."""


def slice_suffix(number: int) -> str:
    """The last part of the name of a node that runs one slice: ``s1``."""
    return f"s{number}"


@dataclass(frozen=True)
class Node:
    """A segment (lane COMPUTE) or an exchange of one microbatch.

    name: ``0.attention``, ``1.dispatch.rail``: the layer's number in the stage, the role, and an exchange's lane.
    after: indexes, ascending, of the nodes whose outputs it takes.
    inputs: whether it takes inputs of the stage, too.
    differentiable: whether gradients go through it.
    weights: whether it has weight gradients, which a W may compute later. An exchange with this mark brought weights,
        and returns their gradients behind W.
    recomputed: whether the forward runs again before the backward. share: recomputed part of the forward, 0 to 1.
    inside: part of the forward, 0 to 1, that its backward recomputes inside itself. again: whether its backward repeats
    element-wise work inside itself.
    slice, slices: the slice of the microbatch that it runs, of so many (`schedc.cell.slices`); 0 of 1 for all rows.
    behind: index of the same node for the slice before, whose gradients are added first; -1 without one.
    """

    name: str
    lane: Lane
    after: tuple[int, ...] = ()
    inputs: bool = False
    differentiable: bool = True
    weights: bool = False
    recomputed: bool = False
    share: float = 1.0
    inside: float = 0.0
    again: bool = False
    slice: int = 0
    slices: int = 1
    behind: int = -1

    @property
    def exchange(self) -> bool:
        return self.lane is not Lane.COMPUTE

    @property
    def layer(self) -> int:
        """Number of the layer in the stage; -1 where the name has none."""
        number = self.name.partition(".")[0]
        return int(number) if number.isdecimal() else -1

    @property
    def whole(self) -> str:
        """The name without its slice."""
        return self.name if self.slices == 1 else self.name.removesuffix(f".{slice_suffix(self.slice)}")

    @property
    def role(self) -> str:
        """``attention``, ``experts``, ``dispatch``: the name without layer and lane."""
        return role_in(self.name)


@lru_cache(maxsize=1 << 14)
def role_in(name: str) -> str:
    """``dispatch`` of ``0.dispatch.rail``, and of ``dispatch.rail``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0].isdecimal() else parts[0]


@dataclass(frozen=True)
class StageShape:
    """The nodes of a stage in topological order, and the ones whose outputs leave it."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            if any(not 0 <= before < index for before in node.after):
                raise CompilerBug("cells", f"node {index} ({node.name}) takes of {node.after}, not all before it")
        if any(not 0 <= index < len(self.nodes) for index in self.outputs) or len(set(self.names)) != len(self.nodes):
            raise CompilerBug("cells", f"outputs {self.outputs} of the nodes {self.names}")

    def __len__(self) -> int:
        return len(self.nodes)

    def __hash__(self) -> int:  # shapes are keys of caches of programs
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.outputs))

    def __reduce__(self) -> tuple[object, ...]:  # hashes of strings differ between processes
        return StageShape, (self.nodes, self.outputs)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @cached_property
    def queues(self) -> tuple[str, ...]:
        """[nodes] the queue of each, of `QUEUES`: its lane, or `COUNTS`.

        The routing shares the communicator of all ranks with flat rows. Rows that take two hops use others, so that
        the routing then has the queue `COUNTS`. The balance is exchanged among all replicas, and no rows are.
        """
        lanes: dict[tuple[int, str], set[Lane]] = {}
        for node in self.nodes:
            lanes.setdefault((node.layer, node.role), set()).add(node.lane)
        hops = {layer for (layer, _), taken in lanes.items() if len(taken) > 1}
        return tuple(
            COUNTS
            if node.exchange and (node.role == "balance" or (node.role in COUNTING and node.layer in hops))
            else node.lane.value
            for node in self.nodes
        )

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """[nodes] the nodes that take each node's outputs, ascending."""
        consumers: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for before in node.after:
                consumers[before].append(index)
        return tuple(map(tuple, consumers))

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """The nodes that have a backward, ascending: differentiable nodes that a gradient reaches."""
        reached: set[int] = set()
        for index in reversed(range(len(self.nodes))):
            wanted = index in self.outputs or not reached.isdisjoint(self.consumers[index])
            if wanted and self.nodes[index].differentiable:
                reached.add(index)
        return tuple(sorted(reached))

    @cached_property
    def backward_order(self) -> tuple[int, ...]:
        """The nodes of `backward` in the order of gradients: from the last node to the first, slices ascending."""
        return self._backwards(self.backward)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """The nodes whose forward is recomputed, ascending. Those without a backward only if all nodes are."""
        return tuple(index for index, node in enumerate(self.nodes) if node.recomputed)

    @cached_property
    def ready(self) -> StageShape:
        """The graph of a microbatch that an R has recomputed: its backward recomputes nothing."""
        if not any(node.recomputed or node.inside for node in self.nodes):
            return self
        plain = (replace(node, recomputed=False, share=1.0, inside=0.0) for node in self.nodes)
        return StageShape(tuple(plain), self.outputs)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The nodes with weight gradients, ascending. Exchanges that return gradients count."""
        reached = set(self.backward)
        return tuple(
            index
            for index, node in enumerate(self.nodes)
            if node.weights and (index in reached or (node.exchange and not reached.isdisjoint(self.consumers[index])))
        )

    @cached_property
    def weight_order(self) -> tuple[int, ...]:
        """The nodes of `weights` in the order of `backward_order`."""
        return self._backwards(self.weights)

    def _backwards(self, nodes: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(nodes, key=lambda index: (self.nodes[index].slice - index, index)))
