"""The layout of a drawing: its scale of time and its rows, decided before anything is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from schedc.drawing.cells import CellColumns

STRIPS_ABOVE = 4000
"""Cells up to which a drawing has numerals and an element per cell; with more cells, its lanes are strips."""

LANES = 256
"""Lanes of the tallest drawing. With more ranks, every n-th rank has a lane."""

_PIECES, _FINEST, _COARSE, _COARSEST = 256_000, 9600, 600, 150
"""Columns of the grid of strips: in all lanes; at most in one lane; at least in the first try; at least in the last."""

MARGIN = 24.0
GUTTER = 84.0
"""px right of the lanes, for the peaks; and the least px left of them, for the names of ranks and stages."""
WIDEST_GUTTER = 180.0

NARROWEST = 400
"""Least px of a drawing: the gutters of the widest names, and some room for lanes."""

_ROOMY, _COMFORTABLE, _LEGIBLE = 36.0, 20.0, 14.0
_USUAL, _WIDE, _WIDEST = 800.0, 2600.0, 16000.0


@dataclass(frozen=True)
class RowBands:
    """px, heights of the parts of one lane from top to bottom, and of the gap to the next lane.

    works: px, height of a strip of works, between cells and memory; not every rank has any.
    """

    phases: float
    cells: float
    memory: float
    gap: float
    works: float

    @property
    def pitch(self) -> float:
        """px of a rank without works."""
        return self.phases + self.cells + self.memory + self.gap


LANE = RowBands(phases=13, cells=24, memory=24, gap=13, works=11)
STRIP_LANE = RowBands(phases=5, cells=16, memory=18, gap=7, works=9)


@dataclass(frozen=True)
class Detail:
    """The amount of detail in a drawing.

    strips: whether lanes are strips, a path per colour instead of an element per cell.
    columns: columns of the grid to which the edges of strips are rounded.
    every: ranks 0, every, 2 * every ... and the last have a lane.
    """

    strips: bool
    columns: int
    every: int

    def coarser(self, excess: float, ranks: int) -> Detail | None:
        """The detail of the next try, after a drawing ``excess`` times too large; None if nothing is left to omit."""
        if not self.strips:
            return replace(self, strips=True)
        if self.columns > _COARSEST:
            return replace(self, columns=max(_COARSEST, int(self.columns / (1.1 * excess))))
        every = max(self.every + 1, int(np.ceil(self.every * excess)))
        return replace(self, every=every) if self.every < ranks else None


def first_detail(cells: CellColumns) -> Detail:
    """The finest detail: an element per cell where cells are few, else strips, with fewer columns for more lanes."""
    ranks = max(cells.schedule.ranks, 1)
    every = -(-ranks // LANES)
    columns = int(np.clip(_PIECES // -(-ranks // every), _COARSE, _FINEST))
    return Detail(len(cells) > STRIPS_ABOVE or every > 1, columns, every)


@dataclass(frozen=True)
class DrawingLayout:
    """Places of times and ranks in a drawing.

    scale: px per time unit. left, top: px, corner of the plot, which has the lanes without their gutters.
    plot_width: px. rows: heights of the parts of each lane. ranks: number of ranks; not each need have a lane.
    strips: number of strips of works under each rank; empty without works.
    """

    scale: float
    left: float
    top: float
    plot_width: float
    rows: RowBands
    ranks: int
    detail: Detail
    strips: tuple[int, ...] = ()

    @property
    def shown(self) -> Iterator[int]:
        """The ranks that have a lane, from the top down."""
        last = self.ranks - 1
        yield from range(0, last, self.detail.every)
        if last >= 0:
            yield last

    @property
    def lanes(self) -> int:
        return self._lane(self.ranks - 1) + 1

    @property
    def right(self) -> float:
        return self.left + self.plot_width

    @property
    def bottom(self) -> float:
        return self.top + self.lanes * self.rows.pitch - self.rows.gap + self._strips_above(self.ranks)

    @property
    def width(self) -> float:
        return self.right + GUTTER + MARGIN

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    def phases_y(self, rank: int) -> float:
        return self.top + self._lane(rank) * self.rows.pitch + self._strips_above(rank)

    def cells_y(self, rank: int) -> float:
        return self.phases_y(rank) + self.rows.phases

    def memory_y(self, rank: int) -> float:
        """Top of the memory curve's row; its base line is ``rows.memory`` below."""
        return self.works_y(rank, self.strips[rank] if self.strips else 0)

    def works_y(self, rank: int, place: int) -> float:
        """Top of a strip of works under the cells of a rank."""
        return self.cells_y(rank) + self.rows.cells + place * self.rows.works

    def _strips_above(self, rank: int) -> float:
        """px that the strips of the ranks above take."""
        return sum(self.strips[above] for above in self.shown if above < rank) * self.rows.works if self.strips else 0.0

    def _lane(self, rank: int) -> int:
        """The number of the lane of a rank that has one; the last rank follows the last multiple of ``every``."""
        return -(-rank // self.detail.every)


def plot_size(cells: CellColumns, strips: bool, width: float | None = None) -> tuple[float, float]:
    """(px per time unit, px) of the plot. It is ``width`` px wide, or as wide as the cells need.

    Short cells (the lower quartile) get 20 px: 14 px where that would make the drawing wider than 2600 px, and 36 px
    where the whole schedule is short. Strips have half a px per cell of the longest rank, within bounds.
    """
    if cells.makespan <= 0:
        return 1.0, width or _USUAL
    if width is not None:
        return width / cells.makespan, width
    if strips:
        width = float(np.clip(np.diff(cells.rank_start).max() * 0.5, 1600.0, _WIDE))
        return width / cells.makespan, width
    lengths = cells.end - cells.start
    shortest, short = np.quantile(lengths[lengths > 0], [0.05, 0.25])
    scale = min(max(_COMFORTABLE / short, _LEGIBLE / shortest), max(_LEGIBLE / short, _WIDE / cells.makespan))
    scale = max(scale, min(_ROOMY / short, _USUAL / cells.makespan))
    scale = min(scale, _WIDEST / cells.makespan)
    return float(scale), max(_USUAL, float(scale) * cells.makespan)


def tick_step(scale: float, apart: float) -> float:
    """The time between ticks: the smallest of 1, 2, 5 times a power of ten that sets them ``apart`` px or more."""
    least = apart / scale
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-12)))
