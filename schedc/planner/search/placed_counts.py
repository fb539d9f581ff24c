"""Counts of the parts of a model on the stages and ranks of a placement, as products with part times want them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.placement import Placement
from schedc.ir.plan import Level
from schedc.plan.layout.parts import WORK, Layout
from schedc.planner.price.recomputed import LEVELS

KINDS = len(WORK)


@dataclass(frozen=True, eq=False)
class PlacedCounts:
    """A layout on a placement with one pipe. Kinds are those of `WORK`.

    of_stage: [stages, kinds] parts of each stage.
    """

    placement: Placement
    of_stage: Floats

    @classmethod
    def of(cls, placement: Placement, layout: Layout) -> PlacedCounts:
        return cls(placement, np.asarray(layout.counts[:, :KINDS], np.float64))

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @cached_property
    def on_rank(self) -> Floats:
        """[P, stages] 1 where a rank holds a stage."""
        return np.asarray(self.placement.rank_of_stage[0] == np.arange(self.ranks)[:, None], np.float64)

    @cached_property
    def first(self) -> Int64:
        """[P] the first stage of each rank."""
        return np.asarray(np.argmax(self.on_rank > 0, axis=1), np.int64)

    @cached_property
    def before(self) -> Floats:
        """[P, stages] 1 for the stages before the first one of each rank."""
        return (np.arange(self.of_stage.shape[0]) < self.first[:, None]).astype(np.float64)

    @cached_property
    def behind(self) -> Floats:
        """[P, stages] 1 for the stages behind the last one of each rank."""
        return (np.arange(self.of_stage.shape[0]) > self._last[:, None]).astype(np.float64)

    @cached_property
    def hops(self) -> Floats:
        """[P] messages from stage 0 to the first stage of each rank."""
        return np.asarray(self._sent[self.first], np.float64)

    @cached_property
    def hops_behind(self) -> Floats:
        """[P] messages from the last stage of each rank to the last one of all."""
        return np.asarray(self._sent[-1] - self._sent[self._last], np.float64)

    @property
    def sent(self) -> float:
        """Messages from stage 0 to the last one."""
        return float(self._sent[-1])

    @cached_property
    def _last(self) -> Int64:
        """[P] the last stage of each rank."""
        return np.asarray(self.on_rank.shape[1] - 1 - np.argmax(self.on_rank[:, ::-1] > 0, axis=1), np.int64)

    @cached_property
    def _sent(self) -> Int64:
        """[stages] messages from stage 0 to each."""
        ranks = self.placement.rank_of_stage[0]
        return np.concatenate([[0], np.cumsum(ranks[1:] != ranks[:-1])])

    def at_level(self, level: str, where: str) -> tuple[int, Floats]:
        """The number of a level of recomputation in `LEVELS`, and [stages] 1 for the stages that have it.

        where: the axis of this name.
        """
        own = self.placement.stage_of_chunk
        stages = {"all": own, "chunk0": own[:, :1], "first_half": own[: self.ranks // 2]}[where]
        applies = np.zeros(self.of_stage.shape[0])
        applies[stages[stages >= 0]] = 1.0
        return LEVELS.index(Level(level)), applies

    def of_chunks(self, of_stages: Floats, absent: float) -> Floats:
        """[..., P, chunks] the values of the stages of each rank. of_stages: [..., stages].

        absent: the value where a rank holds fewer stages than others.
        """
        own = self.placement.stage_of_chunk
        return np.where(own >= 0, of_stages[..., np.maximum(own, 0)], absent)

    def largest(self, of_stages: Floats) -> Floats:
        """[..., P] the largest value among the stages of a rank, at least 0 where it holds fewer than others."""
        return np.asarray(self.of_chunks(of_stages, 0.0).max(axis=-1))


@lru_cache(maxsize=1024)
def placed_counts(layout: Layout, ranks_of_stages: bytes, ranks: int) -> PlacedCounts:
    """The counts of a layout. ranks_of_stages: those of `Placement.rank_of_stage` [1, stages], as bytes."""
    of_stage = np.frombuffer(ranks_of_stages, np.int32)[None, :]
    return PlacedCounts.of(Placement(of_stage, (0, 1), ranks), layout)
