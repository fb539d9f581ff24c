"""Counts a rank's choices of experts: what all ranks of a group tell each other before rows travel.

    columns of a rank   [E] rows by expert, without dropped choices
                        [E] dropped choices by expert                         with a capacity
                        [R] and [nodes] distinct tokens by rank and node      hierarchical and allgather, without one
                        tokens of the rank, and its flags

Every size of every exchange follows from the table of all ranks' columns. A choice that cannot be is a flag, which
travels with the counts: finding it needs no value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

from schedc_runtime.kernels.library import operation
from schedc_runtime.triton_kernels.route_shape import METHODS as METHODS
from schedc_runtime.triton_kernels.route_shape import Method as Method
from schedc_runtime.triton_kernels.route_shape import Shape as Shape
from schedc_runtime.triton_kernels.route_shape import counted_group_sizes as counted_group_sizes

DROPPED, ABSENT = -1, -2
"""Entries of choices: a choice beyond the capacity, without its expert; and the choices of a padding row."""


class Flag(IntFlag):
    """What is wrong with a rank's choices."""

    RANGE = 1
    NAN = 2
    TWICE = 4
    ROOM = 8
    OVERFLOW = 16


TROUBLES = {
    Flag.RANGE: ("chooses an expert whose number is out of range", "experts have numbers from 0 to experts - 1"),
    Flag.NAN: ("has a score that is not a number", "look for a NaN or an infinity in the layers before the router"),
    Flag.TWICE: ("chooses an expert twice for one token", "the choices of a token are different experts"),
    Flag.ROOM: ("gives an expert more rows than its capacity", "drop choices before they are counted"),
}
"""By flag that is an error: the rank's fault, and the remedy."""


@dataclass(frozen=True)
class Choices:
    """A rank's choices, those of a token in ascending order of experts.

    ids: [..., N, k] experts, int16 where that holds them; ``experts`` for a choice that was dropped. slots: [..., N, k]
    where each stood before. unsorted: [..., N, k] the experts as they stood before.
    """

    ids: Tensor
    slots: Tensor
    unsorted: Tensor


def ascending(index: Tensor, experts: int) -> Choices:
    """The choices ``index`` [..., N, k] of experts, where negative numbers and those out of range are none."""
    small = torch.int16 if experts < 2**15 - 1 else torch.int32
    numbers = index.clamp(-1, experts).to(small)
    numbers.add_(numbers < 0, alpha=experts + 1)
    return Choices(*numbers.sort(-1), numbers)


def gathered_counts(index: Tensor, weight: Tensor, experts: int, rows: int) -> Tensor:
    """[rows, k] the choices ``index`` [N, k] themselves, which all ranks gather where experts may be hot.

    int16 where that holds the experts. rows: N after padding by `ABSENT`. A weight that is not a number leaves a mark.
    """
    small = torch.int16 if experts < 2**15 - 1 else torch.int32
    sent = torch.where(weight.isnan(), torch.iinfo(small).min, index).to(small)
    return torch.nn.functional.pad(sent, (0, 0, 0, rows - len(sent)), value=ABSENT)


def counted_rows(choices: Choices, index: Tensor, shape: Shape, weight: Tensor | None = None) -> Tensor:
    """[..., columns] int32: what a rank tells of its choices ``index`` [..., N, k], with gate weights likewise."""
    ids, experts = choices.ids, shape.experts
    rows = tally(ids, experts)
    parts = [rows]
    if shape.capacity is not None:
        marks = torch.where(index < ABSENT, ABSENT - 1 - index, experts)
        parts.append(tally(marks.clamp(max=experts), experts))
    if shape.distinct:
        parts += [_distinct(ids, experts, held) for held in (shape.ranks, shape.nodes)]
    tokens = (index[..., 0] != ABSENT).sum(-1, keepdim=True)
    parts += [tokens, _flags(choices, index, rows, shape, weight).unsqueeze(-1)]
    return torch.cat([part.to(torch.int32) for part in parts], -1)


def _count(index: Tensor, weight: Tensor | None, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = Shape.of(shape)
    choices = ascending(index, sizes.experts)
    return choices.ids, choices.slots, choices.unsorted, counted_rows(choices, index, sizes, weight)


_count_choices = operation(
    "count(Tensor index, Tensor? weight, int[] shape) -> (Tensor, Tensor, Tensor, Tensor)",
    _count,
    "routing:launch_count",
)


def counted_choices(index: Tensor, weight: Tensor, shape: Shape) -> tuple[Choices, Tensor]:
    """`ascending` and `counted_rows` of choices and gate weights [N, k], as one operation."""
    *choices, told = _count_choices(index, weight, shape.numbers)
    return Choices(*choices), told


def floor_divided(numbers: Tensor, divisor: int) -> Tensor:
    """[...] whole ``numbers`` [...] divided by one number, rounded down. A shift takes a fifth of a division's time."""
    if divisor & (divisor - 1):
        return numbers.div(divisor, rounding_mode="floor")
    return numbers >> (divisor.bit_length() - 1)


def owners(ids: Tensor, experts: int, size: int, first: int = 0, parts: int | None = None) -> Tensor:
    """[...] int16 or int32: which of ``parts`` neighbouring groups of ``size`` experts holds each of ``ids`` [...].

    first: the first expert of the first group. ``parts`` where none of them does; None: all groups.
    """
    if parts is None:
        return floor_divided(ids, size)
    table = (torch.arange(experts + 1, device=ids.device) - first).div(size, rounding_mode="floor")
    table = torch.where((table < 0) | (table > parts), parts, table).to(ids.dtype)
    return table.index_select(0, ids.reshape(-1).int()).view(ids.shape)


def run_starts(owner: Tensor, parts: int) -> Tensor:
    """[..., k] which choices are the first of their token with this owner; ``parts`` is no owner."""
    return changes(owner).logical_and_(owner < parts)


def changes(numbers: Tensor) -> Tensor:
    """[..., k] which of ``numbers`` [..., k] are not the one before in their row. The first of a row is a change."""
    flat = numbers.reshape(-1)
    changes = torch.empty(flat.shape, dtype=torch.bool, device=flat.device)
    torch.ne(flat[1:], flat[:-1], out=changes[1:])
    changes = changes.view(numbers.shape)
    changes[..., 0] = True
    return changes


def _distinct(ids: Tensor, experts: int, parts: int) -> Tensor:
    """[..., parts] tokens that have an expert in each of ``parts`` equal parts."""
    owner = owners(ids, experts, experts // parts)
    return tally(owner, parts, changes(owner).int())


def tally(numbers: Tensor, parts: int, weights: Tensor | None = None) -> Tensor:
    """[..., parts] how often each number occurs in ``numbers`` [..., N, k]; ``parts`` itself does not count.

    weights: [..., N, k] int32 how often each entry counts; None: once.
    """
    flat = numbers.flatten(-2).long()
    ones = torch.ones((), dtype=torch.int32, device=flat.device).expand(flat.shape)
    table = torch.zeros(*flat.shape[:-1], parts + 1, dtype=torch.int32, device=flat.device)
    return table.scatter_add_(-1, flat, ones if weights is None else weights.flatten(-2))[..., :parts]


def _flags(choices: Choices, index: Tensor, rows: Tensor, shape: Shape, weight: Tensor | None) -> Tensor:
    """[...] int32 sum of `Flag`s."""
    ids = choices.ids
    wrong = {
        Flag.RANGE: _largest(index) >= shape.experts,
        Flag.TWICE: _anywhere((ids < shape.experts) & ~changes(ids)),
    }
    if weight is not None:
        wrong[Flag.NAN] = weight.sum((-2, -1)).isnan()
    else:
        wrong[Flag.NAN] = _anywhere(index == torch.iinfo(index.dtype).min)
    if shape.capacity is not None:
        wrong[Flag.ROOM] = (rows > shape.capacity).any(-1)
    flags = torch.zeros_like(rows[..., 0])
    for flag, mask in wrong.items():
        flags.add_(mask, alpha=flag.value)
    return flags


def _largest(index: Tensor) -> Tensor:
    """[...] the largest of each [N, k]; -1 where N is 0."""
    return index.amax((-2, -1)) if index.shape[-2] else index.new_full(index.shape[:-2], -1)


def _anywhere(mask: Tensor) -> Tensor:
    """[...] whether any entry of each [N, k] is set."""
    return mask.view(torch.uint8).amax((-2, -1)) > 0 if mask.shape[-2] else mask.any(-1).any(-1)


@dataclass(frozen=True)
class Counts:
    """The table [R, columns] of all ranks, int32, and what its columns are."""

    table: Tensor
    shape: Shape

    @property
    def rows(self) -> Tensor:
        """[R, E] rows by source rank and expert."""
        return self.table[:, : self.shape.experts]

    @property
    def chosen(self) -> Tensor:
        """[R, E] choices by source rank and expert, dropped ones included."""
        return self.rows if self.shape.capacity is None else self.rows + self.dropped

    @property
    def dropped(self) -> Tensor:
        """[R, E] choices that a capacity dropped."""
        return self.table[:, self.shape.experts : 2 * self.shape.experts]

    @property
    def of_ranks(self) -> Tensor:
        """[R, R] distinct tokens by source rank and rank of their experts."""
        return self.table[:, self.shape.experts : self.shape.experts + self.shape.ranks]

    def with_rows_to_ranks(self, table: Tensor) -> Counts:
        """The same, with other numbers `of_ranks`: ``table`` [R, R] int32."""
        first, shape = self.shape.experts, self.shape
        parts = (self.table[:, :first], table, self.table[:, first + shape.ranks :])
        return Counts(torch.cat(parts, 1), shape)

    @property
    def of_nodes(self) -> Tensor:
        """[R, nodes] distinct tokens by source rank and node of their experts."""
        first = self.shape.experts + self.shape.ranks
        return self.table[:, first : first + self.shape.nodes]

    @property
    def tokens(self) -> Tensor:
        """[R] tokens of each rank."""
        return self.table[:, -2]

    @property
    def flags(self) -> Tensor:
        """[R] flags of each rank."""
        return self.table[:, -1]

    @property
    def mine(self) -> Tensor:
        """[R, experts of a rank] rows of this rank's experts by source rank."""
        first = self.shape.rank * self.shape.local
        return self.rows[:, first : first + self.shape.local]

    @property
    def received(self) -> Tensor:
        """[1] int64: rows of this rank's experts, without padding."""
        return self.mine.sum().view(1)

    def ends(self, rows: int) -> Tensor:
        """[experts of a rank] int32: the row behind each expert's last, among the first ``rows``."""
        return self.mine.sum(0).cumsum(0, dtype=torch.int32).clamp_(max=rows)

    @property
    def by_rank(self) -> Tensor:
        """[R, R] rows by source rank and rank of their experts."""
        return self.rows.reshape(self.shape.ranks, self.shape.ranks, self.shape.local).sum(2)

    @property
    def all_flags(self) -> Tensor:
        """[R] int32: flags of each rank, with `Flag.OVERFLOW` where it has more rows than a block of `Shape.bounds`."""
        if self.shape.bounds is None:
            return self.flags
        by_rank, (rail, node) = self.by_rank, self.shape.rooms
        if not self.shape.two_hops:
            over = by_rank > self.shape.block
        else:
            assert rail is not None
            assert node is not None
            beyond = by_rank.sum(0) > self.shape.ranks * self.shape.block
            over = (self.of_ranks > node) | (beyond & (by_rank > 0))
            if self.shape.method == "hierarchical":
                over = torch.cat((over, self.of_nodes > rail), 1)
        return self.flags | over.any(1) * Flag.OVERFLOW.value


def counts_of_experts(everyone: Tensor, shape: Shape) -> Counts:
    """The counts that ranks would gather whose choices are ``everyone`` [R, N, k]."""
    return Counts(counted_rows(ascending(everyone, shape.experts), everyone, shape), shape)


def rows_of_choices(everyone: Tensor, experts: int) -> Tensor:
    """[R, E] int32 rows by source rank and expert of the choices [R, N, k], where others than experts are none."""
    return tally(everyone.clamp(-1, experts) + 1, experts + 1)[..., 1:]


class Runs(NamedTuple):
    """Neighbouring choices of a token that one rank or node holds.

    starts: [levels][N, k] which choices begin a run. counted: [levels][N, k] runs that have begun, up to each choice.
    bags: [levels] number of runs.
    """

    starts: tuple[Tensor, ...]
    counted: tuple[Tensor, ...]
    bags: tuple[Tensor, ...]

    @staticmethod
    def listed(tensors: Sequence[Tensor]) -> Runs:
        """Those whose parts follow each other in a list."""
        levels = len(tensors) // 3
        return Runs(*(tuple(tensors[part * levels : (part + 1) * levels]) for part in range(3)))


def runs(ids: Tensor, shape: Shape) -> Runs:
    """The runs of a rank's choices, by each of `counted_group_sizes`. ids: [N, k] see `Choices`."""
    starts = tuple(
        run_starts(owners(ids, shape.experts, size), shape.experts // size) for size in counted_group_sizes(shape)
    )
    counted = tuple(start.flatten().cumsum(0) for start in starts)
    return Runs(
        starts,
        tuple(count.view(start.shape) for count, start in zip(counted, starts, strict=True)),
        tuple(count[-1:].sum() for count in counted),
    )
