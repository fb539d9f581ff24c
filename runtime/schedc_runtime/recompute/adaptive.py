"""Decides when a stage recomputes: only while a rank gets many more rows than the mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from schedc.ir.plan import By, Level

RELAX = 0.9
"""A layer stops recomputing once its step's fullest rank has less than this part of the threshold."""


class Arrivals(NamedTuple):
    """What one dispatch brings.

    rows: [ranks] number of rows for the experts of each rank, padding included. mean: mean number of rows per rank that
    the routing asked for, dropped choices included.
    """

    rows: tuple[int, ...]
    mean: float

    def imbalance(self, rank: int | None = None) -> float:
        """Rows of the fullest rank, or of ``rank``, over the mean; 1 if the routing asked for none."""
        most = max(self.rows) if rank is None else self.rows[rank]
        return most / self.mean if self.mean else 1.0


@dataclass
class _Layer:
    """on: recompute every microbatch. peak: the largest imbalance of this step so far; None before the first."""

    on: bool = True
    peak: float | None = None


@dataclass
class Adaptive:
    """The decisions of one stage, per step and layer. The step before decides; the first step recomputes everything.

    A microbatch above the threshold is always recomputed. By group, it is recomputed from the rows that were sent,
    whatever the level: held activations then never have more than ``threshold`` times the mean rows. By rank, it is
    recomputed at ``level``. A layer turns off below `RELAX` times the threshold, and on above the threshold.

    threshold: imbalance, rows of the fullest rank over the mean. recomputed, held: number of microbatches so far, over
    all layers. sent: number of recomputed microbatches whose rows are sent a second time.
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
        """Whether any layer recomputes in this step. Parts of the stage that take no rows follow."""
        return not self.layers or any(layer.on for layer in self.layers.values())

    def decide(self, layer: int, arrivals: Arrivals, rank: int) -> Level:
        """The level at which the experts of this microbatch are recomputed. By group, all ranks decide alike."""
        state = self.layers.setdefault(layer, _Layer())
        imbalance = arrivals.imbalance(None if self.by is By.GROUP else rank)
        state.peak = imbalance if state.peak is None else max(state.peak, imbalance)
        above = imbalance > self.threshold
        level = Level.NONE
        if above or state.on:
            level = Level.FULL if above and self.by is By.GROUP else self.level
        self.recomputed += level is not Level.NONE
        self.held += level is Level.NONE
        self.sent += level.exchanges
        return level

    def end_step(self) -> None:
        """Decide for the next step from the imbalances of this one."""
        for state in self.layers.values():
            if state.peak is not None:
                state.on = state.peak > self.threshold * (RELAX if state.on else 1.0)
                state.peak = None
