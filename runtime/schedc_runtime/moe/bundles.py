"""Where rows go inside a node while copies compute some of a home's rows: two hops, and the sums of the plain run.

    choices of a token, by home     a0 a1 | b0 b1 | c0     a0 has a copy on rank b
    computed on                     b  a    b  b    c
    rows of the token               a0, a1, b0 + b1, c0    two of them go to rank b

The choices of a token whose experts have one home are a group. One rank may compute a whole group: then one row
travels, and one sum comes back. Otherwise each of its choices travels alone. The relay adds the rows of a home, and
then homes, in the order of homes. So sums are rounded where they are without copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.moe.bags import Bags, Copies, Take, ended
from schedc_runtime.moe.counts import Shape, changes, floor_divided, owners, tally
from schedc_runtime.moe.trees import arange, in_blocks, inverse, set_entries, taken


class Bundles(NamedTuple):
    """The rows by which the choices of tokens travel.

    owner: [N, k] the rank that computes each choice, by number among ``parts``; ``parts`` where none of them does.
    homes: [N, k] which choices are the first of a home. starts: [N, k] which are the first of a row.
    """

    owner: Tensor
    parts: int
    homes: Tensor
    starts: Tensor

    @staticmethod
    def of(ids: Tensor, homes: Tensor, owner: Tensor, parts: int) -> Bundles:
        """The rows of choices ``ids`` [N, k], places in the order of homes. homes: [places + 1] the home of each."""
        first = changes(homes.index_select(0, ids.reshape(-1).int()).view(ids.shape))
        group = first.flatten().cumsum(0) - 1
        apart = (changes(owner) & ~first).flatten()
        split = torch.zeros(len(group), dtype=torch.int32, device=ids.device).scatter_add_(0, group, apart.int())
        alone = split.index_select(0, group).view(ids.shape) > 0
        there = owner < parts
        return Bundles(owner, parts, first & there, (first | alone) & there)


def rows_to_ranks(ids: Tensor, homes: Tensor, shape: Shape) -> Tensor:
    """[R] int32 rows that the tokens of a rank send to each rank of their node groups. ids, homes: see `Bundles.of`."""
    bundles = Bundles.of(ids, homes, owners(ids, shape.experts, shape.local), shape.ranks)
    return tally(bundles.owner, shape.ranks, bundles.starts.int())


class Relayed(NamedTuple):
    """The copies of rows that go on inside a node, and what is computed for each.

    tree: the copies, and the sums by home and by row. ids: [copies, k] places; none where another copy has the choice.
    """

    tree: Copies
    ids: Tensor


def relayed(ids: Tensor, homes: Tensor, shape: Shape, length: int) -> Relayed:
    """The copies of rows that came over the rail with places ``ids`` [rows, k]. length: their number, with padding."""
    (_, room), (node, _), (rows, top) = shape.rooms, shape.place, ids.shape
    owner = owners(ids, shape.experts, shape.local, node * shape.per_node * shape.local, shape.per_node)
    bundles = Bundles.of(ids, homes, owner, shape.per_node)
    entry, ends = set_entries(bundles.starts, length)
    chosen = entry.clamp(min=0)
    row, key = floor_divided(chosen, top), taken(owner.reshape(-1), chosen)
    blank: Tensor | None = None
    if room is None:
        order = key.argsort(stable=True)
        leaf = inverse(order)
    else:
        blocks = shape.nodes
        key = key.long() * blocks + row.div(max(1, rows // blocks), rounding_mode="floor")
        none = shape.per_node * blocks
        layout, sorted_entries, leaf = in_blocks(torch.where(entry < 0, none, key), none, room)
        direct, blank = layout.sources(length)
        order = sorted_entries.index_select(0, direct)
    copied = row.index_select(0, order)
    number = bundles.starts.flatten().cumsum(0).view(ids.shape) - 1
    other = (taken(number, copied) != order.unsqueeze(1)) | (taken(owner, copied) >= shape.per_node)
    numbers = taken(ids, copied).masked_fill_(other, shape.experts)
    if blank is not None:
        copied, leaf = copied.masked_fill_(blank, 0), leaf.masked_fill_(entry < 0, 0)
        numbers.masked_fill_(blank.unsqueeze(1), shape.experts)
    return Relayed(Copies(Take(copied, blank), _levels(bundles, leaf, ends, number, padded=room is not None)), numbers)


def _levels(bundles: Bundles, leaf: Tensor, ends: Tensor, number: Tensor, *, padded: bool) -> tuple[Bags, Bags]:
    """The sums by home, then by row. leaf: [copies] of each row that travels, by row and choice.

    ends: [rows + 1] copies before each row. number: [rows, k] the copy of each choice.
    """
    room, last = len(leaf), ends[-1]
    counted = bundles.homes.flatten().cumsum(0)
    begins = last.expand(room + 2).clone()
    begins.scatter_(0, (counted * bundles.homes.flatten()).clamp_(max=room + 1), number.flatten())
    before = functional.pad(counted.view(number.shape)[:, -1], (1, 0))
    by_home = Bags(*ended(leaf, begins[1:], padded=padded), room)
    return by_home, Bags(*ended(arange(room, leaf), before, padded=True), len(number))
