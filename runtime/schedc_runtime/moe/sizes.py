"""The sizes of a route that the host needs: one copy from the device, started with the plan and joined where needed.

    START   the vector's copy to pinned memory, an event behind it
    WAIT    the event; the numbers, by name; an error where a rank has flagged its choices

Both are steps of a cell where a layer has a `SizesExchange`: other segments run between them.

With a capacity or bounds every size is constant, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from schedc.cell.graph import Lane
from schedc_runtime.device.choice import HostCopy
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.library import operation
from schedc_runtime.moe.counts import TROUBLES, Counts, Flag, Runs, Shape, counted_group_sizes, runs
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.transport.collectives import SoloCommunicator


class HopSplits(NamedTuple):
    """[members] rows to and from each member of a hop."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows.

    counts: [experts of this rank] rows of each expert after `arrive`, padding included. With bounds it is (rows of the
    rank,): the device alone knows the rows of each expert. hops: splits by hop. ranks: [R] rows that reach each rank's
    experts, padding included. tokens: [R] tokens of each rank. bags: sums of each level at the source of a flat
    combine, see `trees.flat_levels`.
    """

    counts: tuple[int, ...]
    hops: dict[str, HopSplits]
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    bags: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of this rank's experts."""
        return sum(self.counts)


class RoutingFault(RuntimeFault):
    """A rank's choices of experts cannot be."""


class CopiedSizes:
    """Sizes on the device, and on their way to the host: `start` is START, `join` is WAIT."""

    def __init__(self, ids: Tensor, counts: Counts) -> None:
        self._shape = counts.shape
        vector, *self.runs = _plan_sizes(ids, counts.table, counts.shape.numbers)
        self._vector: Tensor | None = vector
        self._copy: HostCopy | None = None
        self._sizes: Sizes | None = None

    runs: Sequence[Tensor]
    """[...] the `Runs` of this rank's choices, one after the other."""

    def start(self) -> Tensor:
        """The vector of sizes, int32 [numbers], on its way to the host. A second call changes nothing."""
        if self._vector is not None:
            self._copy, self._vector = HostCopy(self._vector), None
        assert self._copy is not None
        return self._copy.tensor

    def join(self, where: str = "a MoE layer") -> Sizes:
        """The sizes. Raises `RoutingFault` if a rank has a flag. where: the layer and the microbatch, for messages."""
        if self._sizes is None:
            self.start()
            assert self._copy is not None
            numbers = self._copy.join().tolist()
            named: dict[str, tuple[int, ...]] = {}
            for name, length in _lengths(self._shape).items():
                named[name], numbers = tuple(numbers[:length]), numbers[length:]
            check_flags(named["flags"], where)
            self._sizes, self._copy = _sizes(named, self._shape), None
        return self._sizes


Marks = list[tuple[str, list[int]]]
"""Layer and microbatch, for messages, and [ranks of the expert group] flags; without those that are all zero."""


def overflowed(marks: Marks) -> bool:
    """Whether any rank had more rows than bounded buffers hold."""
    return any(value & Flag.OVERFLOW.value for _, flags in marks for value in flags)


def check_flags(flags: Sequence[int], where: str) -> None:
    """Raise `RoutingFault` if any of ``flags`` [R] is set: the same error on all ranks of the group."""
    if not any(flags):  # the usual case: a comparison with an `IntFlag` takes a microsecond
        return
    for flag, (trouble, help) in TROUBLES.items():
        ranks = [rank for rank, value in enumerate(flags) if value & flag]
        if ranks:
            raise RoutingFault(f"{where}: rank {ranks[0]} of the expert group {trouble}", help)


def _lengths(shape: Shape) -> dict[str, int]:
    """How many numbers the vector of sizes has of each name, in their order."""
    ranks, nodes, per_node = shape.ranks, shape.nodes, shape.per_node
    same = {"flags": ranks, "tokens": ranks, "ranks": ranks, "counts": shape.local}
    same["bags"] = 0 if shape.two_hops else len(counted_group_sizes(shape))
    if not shape.two_hops:
        return same | {"flat send": ranks, "flat receive": ranks}
    return same | {"rail send": nodes, "rail receive": nodes, "node send": per_node, "node receive": per_node}


def _parts(counts: Counts, bags: Sequence[Tensor]) -> dict[str, Tensor]:
    """[numbers] on the device, by name."""
    shape = counts.shape
    (node, position), nodes, per_node = shape.place, shape.nodes, shape.per_node
    by_rank = (shape.ranks, shape.local)
    parts = {
        "flags": counts.flags,
        "tokens": counts.tokens,
        "ranks": counts.rows.sum(0).view(by_rank).sum(1),
        "counts": counts.mine.sum(0),
        "bags": torch.stack(tuple(bags)) if bags else counts.flags[:0],
    }
    if not shape.two_hops:
        sent = counts.rows[shape.rank].view(by_rank).sum(1)
        return parts | {"flat send": sent, "flat receive": counts.mine.sum(1)}
    rail = slice(position, None, per_node)  # the ranks of the same position
    inside = slice(node * per_node, (node + 1) * per_node)
    if shape.method == "allgather":
        parts |= {"rail send": counts.tokens[shape.rank].expand(nodes), "rail receive": counts.tokens[rail]}
    else:
        parts |= {"rail send": counts.of_nodes[shape.rank], "rail receive": counts.of_nodes[rail, node]}
    passed = counts.of_ranks[:, shape.rank].view(nodes, per_node).sum(0)
    return parts | {"node send": counts.of_ranks[rail, inside].sum(0), "node receive": passed}


def _sizes(named: dict[str, tuple[int, ...]], shape: Shape) -> Sizes:
    hops = ("rail", "node") if shape.two_hops else ("flat",)
    splits = {hop: HopSplits(named[f"{hop} send"], named[f"{hop} receive"]) for hop in hops}
    return Sizes(named["counts"], splits, named["ranks"], named["tokens"], named["bags"])


def _of_counts(ids: Tensor, table: Tensor, numbers: Sequence[int]) -> list[Tensor]:
    shape = Shape.of(numbers)
    own = Runs((), (), ()) if shape.two_hops else runs(ids, shape)
    parts = _parts(Counts(table, shape), own.bags)
    return [torch.cat([part.to(torch.int32) for part in parts.values()]), *chain(*own)]


_plan_sizes = operation(
    "plan_sizes(Tensor ids, Tensor table, int[] shape) -> Tensor[]", _of_counts, "sizes:launch_plan_sizes"
)
"""The vector of sizes, int32 [numbers], and the `Runs` of choices ``ids`` [N, k]."""


class Copying(Protocol):
    """The part of a `Route` that `SizesExchange` uses."""

    copied: CopiedSizes
    where: str


class SizesExchange(Exchange):
    """The copy of a route's sizes to the host, without another rank: to int32 [numbers], and without a gradient."""

    label, differentiable = "sizes", False
    lane = Lane.HOST.value

    def __init__(self) -> None:
        super().__init__()
        self.alone = SoloCommunicator("host")

    def start(self, route: Copying, *payload: Tensor) -> Pending:
        return Pending(self.alone, (route.copied, route.where, route.copied.start()))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        copied, where, vector = pending.handle
        copied.join(where)
        return (vector,)


class LaterSizes:
    """The sizes of a route that waits for the numbers of its rows: see `DistinctExchange`."""

    runs: Sequence[Tensor] = ()
    """[0] none."""

    def start(self) -> NoReturn:
        """Refuses: a route without numbers of rows has no sizes."""
        raise ValueError("the sizes of a route are copied once it has its numbers of rows")

    def join(self, where: str = "") -> Sizes:
        """Refuses as `start`."""
        raise ValueError("the sizes of a route are there once it has its numbers of rows")


class ConstantSizes:
    """The sizes of padded blocks: those of every microbatch of as many tokens, so that there is nothing to wait for."""

    runs: Sequence[Tensor] = ()
    """[0] none: they are made with the trees."""

    def __init__(self, shape: Shape, tokens: int, top: int, parts: int = 1) -> None:
        """parts: of the buffer, each with room for all rows: two where rows of borrowed experts lie apart."""
        rows = shape.ranks * shape.block
        counts = (parts * rows,) if shape.capacity is None else (shape.ranks * shape.capacity,) * shape.local
        self._sizes = Sizes(
            counts, _constant_splits(shape), (rows,) * shape.ranks, (tokens,) * shape.ranks,
            tuple(tokens * min(top, shape.experts // size) for size in counted_group_sizes(shape)),
        )  # fmt: skip

    def start(self) -> None:
        """Nothing is copied."""

    def join(self, where: str = "") -> Sizes:
        """The sizes."""
        return self._sizes


def _constant_splits(shape: Shape) -> dict[str, HopSplits]:
    if not shape.two_hops:
        each = (shape.block,) * shape.ranks
        return {"flat": HopSplits(each, each)}
    on_rail, on_node = shape.rooms
    assert on_rail is not None
    assert on_node is not None
    rail, node = (on_rail,) * shape.nodes, (shape.nodes * on_node,) * shape.per_node
    return {"rail": HopSplits(rail, rail), "node": HopSplits(node, node)}
