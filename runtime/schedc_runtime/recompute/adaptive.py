"""When a stage works out again: only while many more rows come to a rank than to the mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from schedc.plan.values import By, Level

RELAX = 0.9
"""A layer stops recomputing once its step's fullest rank has less than this part of the threshold."""


class Arrivals(NamedTuple):
    """What one dispatch brings. rows: [ranks] of the experts of each, padding included. mean: of what was wanted."""

    rows: tuple[int, ...]
    mean: float

    def imbalance(self, rank: int | None = None) -> float:
        """Rows of the fullest rank, or of ``rank``, over the mean; 1 where nothing was wanted."""
        most = max(self.rows) if rank is None else self.rows[rank]
        return most / self.mean if self.mean else 1.0


@dataclass
class _Layer:
    """on: recompute, whatever a microbatch has. peak: the largest imbalance of this step; None before any."""

    on: bool = True
    peak: float | None = None


@dataclass
class Adaptive:
    """The decisions of one stage: per step and layer, by the step before, the first one as if it were the worst.

    A microbatch above the threshold is worked out again in any case: by group from the rows as they were sent, whatever
    the level, so that what is kept never has more than ``threshold`` times the mean rows; by rank at the level, which
    holds what the level holds. A layer goes off below `RELAX` times the threshold, and on above it.
    recomputed, held: microbatches so far, of all layers; sent: those of the former whose rows are sent again.
    """

    level: Level
    threshold: float
    by: By
    layers: dict[int, _Layer] = field(default_factory=dict)
    recomputed: int = 0
    held: int = 0
    sent: int = 0

    @property
    def on(self) -> bool:
        """Whether any layer recomputes in this step, and with it what is of no layer alone and takes no rows."""
        return not self.layers or any(layer.on for layer in self.layers.values())

    def decide(self, layer: int, brought: Arrivals, rank: int) -> Level:
        """What of the experts of this microbatch is worked out again; by group the same on all ranks."""
        state = self.layers.setdefault(layer, _Layer())
        found = brought.imbalance(None if self.by is By.GROUP else rank)
        state.peak = found if state.peak is None else max(state.peak, found)
        above = found > self.threshold
        level = Level.NONE
        if above or state.on:
            level = Level.FULL if above and self.by is By.GROUP else self.level
        self.recomputed += level is not Level.NONE
        self.held += level is Level.NONE
        self.sent += level.exchanges
        return level

    def end_step(self) -> None:
        """Decide on the next step from what came in this one."""
        for state in self.layers.values():
            if state.peak is not None:
                state.on = state.peak > self.threshold * (RELAX if state.on else 1.0)
                state.peak = None
