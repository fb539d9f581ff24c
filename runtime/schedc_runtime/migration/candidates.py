"""Chooses where the experts of a layer should lie: staying, prefixes of swaps, or a placement made anew (LPT).

    rows by bin       385 220 139 280          bins are ranks, or nodes beside `balance`
    swaps             the fullest bin gives an expert for a lighter one, again and again: each prefix is a candidate
    LPT               experts, the heaviest first, go to the emptiest bin with a place left: over all bins at once, or
                      over nodes and then over the ranks of each (Graham, 1969: longest processing time first)

The gain of a candidate is what the fullest bin loses, over the steps until the next choice. Its cost is the load of
the fullest link. The unit of both is the time of a rank's mean rows in one step, in the experts of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedc_runtime.moe.placement import ExpertPlaces

Bins = NDArray[np.int64]
"""[units] the bin of each unit of experts."""


@dataclass(frozen=True)
class MoveTerms:
    """What a choice depends on beside the load.

    ranks, per_node: of the expert group. node, rail: time of an expert's way inside a node and between nodes, in the
    unit of the file's first lines. steps: until the next choice. least: net gain per step up to which experts stay.
    by_node: whether only the fullest node counts. unit: experts that stay together, with neighbouring numbers.
    """

    ranks: int
    per_node: int
    node: float
    rail: float
    steps: int
    least: float = 0.0
    by_node: bool = False
    unit: int = 1


class PlacesChoice(NamedTuple):
    """A placement and what it brings. before, after: rows of the fullest bin over the mean. moved: experts that change
    their ranks. cost: time of the fullest link, in the unit of the file. way: how the placement was found."""

    places: ExpertPlaces
    way: str
    before: float
    after: float
    moved: int
    cost: float

    def told(self, terms: MoveTerms) -> str:
        """The choice in words."""
        if not self.moved:
            return f"experts stay, max/mean {self.before:.3f}"
        fullest = "nodes" if terms.by_node else "ranks"
        return (
            f"{self.way}, max/mean of {fullest} {self.before:.3f} to {self.after:.3f}, {self.moved} experts move, each"
            f" {max(terms.node, terms.rail):.2g} of the time of a rank's experts in a step, paid back after"
            f" {self.payback:.2g} steps; threshold {100 * terms.least:g} %"
        )

    @property
    def gain(self) -> float:
        """What a step gains."""
        return self.before - self.after

    @property
    def payback(self) -> float:
        """Steps until the gain has paid for the moves."""
        return self.cost / self.gain if self.gain > 0 else float("inf")

    def net(self, steps: int) -> float:
        """The gain of a step, less its part of the cost over so many steps."""
        return self.gain - self.cost / steps


def choose_places(share: NDArray[np.float64], places: ExpertPlaces, terms: MoveTerms) -> PlacesChoice:
    """The candidate with the largest net gain; staying where none is above ``terms.least``.

    share: [experts] predicted part of all choices.
    """
    cut = _Cut.of(share, places, terms)
    stay = _judged(places, "stay", share, places, cut)
    if cut.bins < 2 or cut.slots < 1 or not _whole(places, terms.unit):
        return stay
    judged = [_judged(_placed(bins, places, cut), way, share, places, cut) for way, bins in _candidates(cut)]
    best = max(judged, key=lambda each: (each.net(terms.steps), -each.moved), default=stay)
    return best if best.gain > 0 and best.net(terms.steps) > terms.least else stay


def _whole(places: ExpertPlaces, unit: int) -> bool:
    """Whether the experts of each unit lie side by side, as those of another unit can."""
    blocks = np.array(places.order).reshape(-1, unit)
    return bool((blocks == blocks[:, :1] // unit * unit + np.arange(unit)).all())


class _Cut(NamedTuple):
    """Experts in units and places in bins. load: [units]. now: [units] their bins. slots: units of a bin."""

    terms: MoveTerms
    load: NDArray[np.float64]
    now: Bins
    bins: int
    slots: int

    @staticmethod
    def of(share: NDArray[np.float64], places: ExpertPlaces, terms: MoveTerms) -> _Cut:
        bins = terms.ranks // terms.per_node if terms.by_node else terms.ranks
        slots = len(share) // bins // terms.unit
        first = np.array(places.places)[:: terms.unit] // terms.unit
        return _Cut(terms, share.reshape(-1, terms.unit).sum(1), first // max(1, slots), bins, slots)


def _candidates(cut: _Cut) -> Iterator[tuple[str, Bins]]:
    for number, bins in enumerate(_swaps(cut), 1):
        yield f"{number} swap{'s' if number > 1 else ''}", bins
    every = np.arange(cut.bins)
    yield "LPT", _kept_close(_lpt(cut.load, np.arange(len(cut.load)), cut.bins, cut.slots), cut.now, [every])
    nodes = cut.bins // cut.terms.per_node
    if not cut.terms.by_node and nodes > 1:
        yield "LPT by node", _two_levels(cut, nodes)


def _swaps(cut: _Cut) -> Iterator[Bins]:
    """The bins behind one swap, two, ...: each lowers the larger of the two bins as far as one swap can."""
    now, rows = cut.now.copy(), np.bincount(cut.now, cut.load, cut.bins)
    for _ in range(len(now)):
        fullest = int(rows.argmax())
        mine, others = np.flatnonzero(now == fullest), np.flatnonzero(now != fullest)
        given = cut.load[mine][:, None] - cut.load[others][None, :]
        higher = np.maximum(rows[fullest] - given, rows[now[others]][None, :] + given)
        one, other = np.unravel_index(int(higher.argmin()), higher.shape)
        if higher[one, other] >= rows[fullest] * (1 - 1e-12):
            return
        unit, for_unit, change = mine[one], others[other], given[one, other]
        rows[fullest] -= change
        rows[now[for_unit]] += change
        now[unit], now[for_unit] = now[for_unit], fullest
        yield now.copy()


def _lpt(load: NDArray[np.float64], units: NDArray[np.int64], bins: int, slots: int) -> Bins:
    """[units] bins of some ``units``: the heaviest first, each to the emptiest bin with a place left."""
    rows, left = np.zeros(bins), np.full(bins, slots)
    result = np.empty(len(units), np.int64)
    for index in np.argsort(-load[units], kind="stable"):
        chosen = int(np.where(left > 0, rows, np.inf).argmin())
        result[index] = chosen
        rows[chosen] += load[units[index]]
        left[chosen] -= 1
    return result


def _two_levels(cut: _Cut, nodes: int) -> Bins:
    per_node, every = cut.terms.per_node, np.arange(len(cut.load))
    by_node = _lpt(cut.load, every, nodes, cut.slots * per_node)
    by_node = _kept_close(by_node, cut.now // per_node, [np.arange(nodes)])
    result = np.empty(len(every), np.int64)
    for node in range(nodes):
        units = np.flatnonzero(by_node == node)
        result[units] = node * per_node + _lpt(cut.load, units, per_node, cut.slots)
    return _kept_close(result, cut.now, [np.arange(node * per_node, (node + 1) * per_node) for node in range(nodes)])


def _kept_close(bins: Bins, now: Bins, sets: list[NDArray[np.int64]]) -> Bins:
    """``bins`` under other numbers, inside each of ``sets`` of bins, so that many units stay where they are ``now``."""
    size = sum(map(len, sets))
    names, together = np.arange(size), np.zeros((size, size), np.int64)
    np.add.at(together, (bins, now), 1)
    for members in sets:
        common = together[np.ix_(members, members)]
        for _ in members:
            one, other = np.unravel_index(int(common.argmax()), common.shape)
            names[members[one]] = members[other]
            common[one], common[:, other] = -1, -1
    return names[bins]


def _placed(bins: Bins, places: ExpertPlaces, cut: _Cut) -> ExpertPlaces:
    """The placement by ``bins``: units that stay in a bin keep their place; others take free places, ascending."""
    unit, per_bin = cut.terms.unit, cut.slots
    first = np.array(places.places)[::unit] // unit
    block_of = np.where(bins == cut.now, first, -1)
    taken = set(block_of[block_of >= 0].tolist())
    for chosen in np.unique(bins[block_of < 0]).tolist():
        free = (block for block in range(chosen * per_bin, (chosen + 1) * per_bin) if block not in taken)
        for moving in np.flatnonzero((bins == chosen) & (block_of < 0)).tolist():
            block_of[moving] = next(free)
    order = np.empty(len(bins) * unit, np.int64)
    for index, block in enumerate(block_of.tolist()):
        order[block * unit : (block + 1) * unit] = np.arange(index * unit, (index + 1) * unit)
    return ExpertPlaces(tuple(order.tolist()))


def _judged(
    places: ExpertPlaces, way: str, share: NDArray[np.float64], before: ExpertPlaces, cut: _Cut
) -> PlacesChoice:
    terms = cut.terms
    local = len(share) // terms.ranks
    size = len(share) // cut.bins
    old, new = np.array(before.places), np.array(places.places)
    full = [float(np.bincount(at // size, share, cut.bins).max() * cut.bins / share.sum()) for at in (old, new)]
    source, target = old // local, new // local
    moved = source != target
    way_of = np.where(source // terms.per_node == target // terms.per_node, terms.node, terms.rail) * moved
    links = [np.bincount(ends, way_of, terms.ranks).max() for ends in (source, target)]
    return PlacesChoice(places, way, full[0], full[1], int(moved.sum()), float(max(links)))
