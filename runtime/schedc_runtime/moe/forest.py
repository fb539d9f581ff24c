"""Which rank computes which rows of experts so that all ranks have as many: a plan in closed form, on the device.

    rows by home    385 220 139 280     limit 256 each
    surplus         129           24    homes 0 and 3, the largest first, on one line of 153 rows
    room                 36 117         ranks 2 and 1, the largest first, on the same line
    plan            home 0 gives 117 to rank 2 and 36 to rank 1; the 24 of these that are too many it gets from home 3

A rank with room has one parent: the home in whose part of the line its own part begins. The parent gives all of that
part. What lies beyond the parent's own part it gets back from the next home. Thus each rank holds experts of one other
rank at most, and E / R slots always suffice. Only own rows are given, so no row moves twice.

All numbers are whole, and all sorts are stable: ranks with the same table have the same plan.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Forest(NamedTuple):
    """Who computes whose rows, for a table of rows or for a batch [...] of tables.

    parent: [..., R] int64 the home whose rows a rank takes; itself for a rank that takes none. taken: [..., R] number
    of these rows. quota: [..., R, m] how many of them belong to each expert of the parent.
    """

    parent: Tensor
    taken: Tensor
    quota: Tensor


def limits(load: Tensor, within: Fraction) -> Tensor:
    """[..., R] the most rows of each rank. load: [..., R] int64 rows by home. within: most over mean, at least 1.

    For 1 the fullest ranks have one row more, as many as the mean leaves over. Otherwise the limit is rounded up.
    """
    ranks, total = load.shape[-1], load.sum(-1, keepdim=True)
    if within > 1:
        most = -(-total * within.numerator).div(ranks * within.denominator, rounding_mode="floor")
        return most.expand_as(load)
    number = torch.arange(ranks, device=load.device).expand_as(load)
    fullest = load.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(fullest).scatter_(-1, fullest, number)
    return total.div(ranks, rounding_mode="floor") + (rank < total.remainder(ranks))


def plan_forest(rows: Tensor, within: Fraction) -> Forest:
    """The plan for ``rows`` [..., R, m] int64 by home and expert of the home. within: most over mean, at least 1."""
    load = rows.sum(-1)
    most = limits(load, within)
    surplus, homes = (load - most).clamp(min=0).sort(dim=-1, descending=True, stable=True)
    room, receivers = (most - load).clamp(min=0).sort(dim=-1, descending=True, stable=True)
    given = surplus.cumsum(-1)
    filled = torch.minimum(room.cumsum(-1), given[..., -1:])
    begin = functional.pad(filled[..., :-1], (1, 0))
    last = load.shape[-1] - 1
    parents = homes.gather(-1, torch.searchsorted(given, begin, right=True).clamp_(max=last))
    beyond = filled.gather(-1, torch.searchsorted(filled, given).clamp_(max=last)) - given
    beyond.clamp_(min=0)  # behind the last home nothing is left
    # A rank has a surplus or room, so that the two scatters never meet in a number above 0.
    taken = torch.zeros_like(load).scatter_(-1, receivers, filled - begin).scatter_add_(-1, homes, beyond)
    parent = torch.zeros_like(homes).scatter_(-1, receivers, parents)
    behind = torch.zeros_like(homes).scatter_(-1, homes, homes.roll(-1, -1))
    parent = torch.where(load > most, behind, parent)
    parent = torch.where(taken > 0, parent, torch.arange(last + 1, device=load.device))
    return Forest(parent, taken, _quotas(rows, parent, taken))


def _quotas(rows: Tensor, parent: Tensor, taken: Tensor) -> Tensor:
    """[..., R, m] `Forest.quota`: a home's experts and its children, both largest first, overlap on one line."""
    sizes, experts = rows.sort(dim=-1, descending=True, stable=True)
    ends = sizes.cumsum(-1)
    theirs = parent.unsqueeze(-1).expand_as(rows)
    ends, order = ends.gather(-2, theirs), experts.gather(-2, theirs)
    begins = ends - sizes.gather(-2, theirs)
    first = _places_on_line(parent, taken).unsqueeze(-1)
    overlap = torch.minimum(ends, first + taken.unsqueeze(-1)) - torch.maximum(begins, first)
    return torch.zeros_like(rows).scatter_(-1, order, overlap.clamp_(min=0))


def _places_on_line(parent: Tensor, taken: Tensor) -> Tensor:
    """[..., R] rows that children before each rank take of its parent."""
    order = taken.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, parent.gather(-1, order).argsort(dim=-1, stable=True))
    sorted_taken = taken.gather(-1, order)
    by_parent = torch.zeros_like(taken).scatter_add_(-1, parent, taken)
    before = (by_parent.cumsum(-1) - by_parent).gather(-1, parent.gather(-1, order))
    return torch.empty_like(taken).scatter_(-1, order, sorted_taken.cumsum(-1) - sorted_taken - before)


def computed_rows(rows: Tensor, forest: Forest) -> Tensor:
    """[..., R, R, m] rows by the rank that computes them, their home, and the home's expert. rows: [..., R, m]."""
    ranks = rows.shape[-2]
    everyone = torch.arange(ranks, device=rows.device)
    lent = (forest.parent.unsqueeze(-1) == everyone).unsqueeze(-1) * forest.quota.unsqueeze(-2)
    own = (everyone[:, None] == everyone).unsqueeze(-1)
    return lent + own * (rows - lent.sum(-3)).unsqueeze(-3)
