"""The sizes of routes that all microbatches share, for kernels and their twins. Nothing here needs Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from schedc.step.costs.exchange import BoundedRows

Method = Literal["flat", "hierarchical", "allgather"]
METHODS: tuple[Method, ...] = ("flat", "hierarchical", "allgather")


@dataclass(frozen=True)
class Shape:
    """The sizes that all microbatches share.

    experts: number of experts of all ranks. nodes, per_node: of the group; rank = node * per_node + position. rank:
    this rank. capacity: rows of a block, an expert's from a rank, padding included. bounds: rows of each block, where
    every choice is kept; without both, counts are exact. tokens: the most that a rank has; exact counts do not need it.
    """

    experts: int
    nodes: int = 1
    per_node: int = 1
    rank: int = 0
    method: Method = "flat"
    capacity: int | None = None
    tokens: int = 0
    bounds: BoundedRows | None = None

    @cached_property
    def numbers(self) -> list[int]:
        """All fields as numbers, for operations of torch: -1 is None."""
        bounds = self.bounds or (-1, -1, -1)
        capacity = -1 if self.capacity is None else self.capacity
        method = METHODS.index(self.method)
        return [self.experts, self.nodes, self.per_node, self.rank, method, capacity, self.tokens, *bounds]

    @staticmethod
    def of(numbers: Sequence[int]) -> Shape:
        """The shape with these `numbers`."""
        return _shape_of(tuple(numbers))

    @property
    def padded(self) -> bool:
        """Whether blocks of rows have sizes that do not follow the routing."""
        return self.capacity is not None or self.bounds is not None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def local(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.ranks

    @property
    def two_hops(self) -> bool:
        return self.method != "flat"

    @property
    def place(self) -> tuple[int, int]:
        """(node, position) of this rank."""
        return divmod(self.rank, self.per_node)

    @property
    def distinct(self) -> bool:
        """Whether ranks tell each other numbers of distinct tokens."""
        return self.two_hops and self.capacity is None

    @property
    def columns(self) -> int:
        """Numbers that a rank tells."""
        marks = self.experts if self.capacity is not None else 0
        return self.experts + marks + (self.ranks + self.nodes) * self.distinct + 2

    @property
    def rooms(self) -> tuple[int, int] | tuple[None, None]:
        """Padded rows of a block from one rank, on the rail and in the node; None where counts are exact."""
        if self.bounds is not None:
            return self.tokens if self.method == "allgather" else self.bounds.rail, self.bounds.node
        if self.capacity is None:
            return None, None
        of_rank, of_node = self.local * self.capacity, self.per_node * self.local * self.capacity
        return self.tokens if self.method == "allgather" else min(self.tokens, of_node), min(self.tokens, of_rank)

    @property
    def block(self) -> int:
        """Padded rows from one rank for all experts of another."""
        if self.bounds is not None:
            return self.bounds.pair
        assert self.capacity is not None
        return self.local * self.capacity


@lru_cache
def _shape_of(numbers: tuple[int, ...]) -> Shape:
    experts, nodes, per_node, rank, method, capacity, tokens, *bounds = numbers
    held = BoundedRows(*bounds) if bounds[0] >= 0 else None
    return Shape(experts, nodes, per_node, rank, METHODS[method], None if capacity < 0 else capacity, tokens, held)


def counted_group_sizes(shape: Shape) -> tuple[int, ...]:
    """Experts of each group by which a flat combine sums before it sums by token: those of a rank, then of a node."""
    ranks = (shape.local,) if shape.ranks > 1 and shape.local > 1 else ()
    nodes = (shape.local * shape.per_node,) if shape.nodes > 1 and shape.per_node > 1 else ()
    return ranks + nodes
