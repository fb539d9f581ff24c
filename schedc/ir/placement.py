"""Which rank holds which stage, for each pipe of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int32, bincount


@dataclass(frozen=True, eq=False)
class Placement:
    """Stages on ranks.

    A pipe is one direction of the schedule with its own copy of every stage. Most schedules have one;
    DualPipe and Chimera have two, so that a stage lives on two ranks whose gradients are to be summed.

    rank_of_stage: [pipes, stages] rank that holds the stage for that pipe.
    first_microbatch: pipe p owns the microbatches first_microbatch[p] ..< first_microbatch[p + 1].
    ranks: number of ranks, P.
    """

    rank_of_stage: Int32
    first_microbatch: tuple[int, ...]
    ranks: int

    @property
    def pipes(self) -> int:
        return int(self.rank_of_stage.shape[0])

    @property
    def stages(self) -> int:
        return int(self.rank_of_stage.shape[1])

    @property
    def microbatches(self) -> int:
        return self.first_microbatch[-1]

    @cached_property
    def chunks(self) -> int:
        """The largest number of chunks (stages, over all pipes) on one rank."""
        return int(bincount(self.rank_of_stage.ravel(), minlength=self.ranks).max())

    @cached_property
    def chunk_of(self) -> Int32:
        """[pipes, stages] number of the chunk on its rank; chunks count by pipe, then by stage."""
        flat = self.rank_of_stage.ravel()
        order = np.argsort(flat, kind="stable")
        starts = np.searchsorted(flat[order], np.arange(self.ranks))
        chunk = np.empty_like(flat)
        chunk[order] = np.arange(flat.size) - starts[flat[order]]
        return chunk.reshape(self.rank_of_stage.shape).astype(np.int32)

    @cached_property
    def stage_of_chunk(self) -> Int32:
        """[ranks, chunks] stage of each chunk; -1 where a rank holds fewer."""
        return self._by_chunk(np.arange(self.stages)[None, :])

    @cached_property
    def pipe_of_chunk(self) -> Int32:
        """[ranks, chunks] pipe of each chunk; -1 where a rank holds fewer."""
        return self._by_chunk(np.arange(self.pipes)[:, None])

    def _by_chunk(self, values: npt.NDArray[np.int64]) -> Int32:
        table = np.full((self.ranks, self.chunks), -1, np.int32)
        table[self.rank_of_stage, self.chunk_of] = values
        return table

    def pipe_of_microbatch(self, microbatch: Int32) -> Int32:
        """Pipe of each microbatch number."""
        return (np.searchsorted(np.asarray(self.first_microbatch), microbatch, side="right") - 1).astype(np.int32)

    def rank_of(self, stage: Int32, microbatch: Int32) -> Int32:
        """The rank that must run the ops of ``stage`` for ``microbatch``, elementwise."""
        if self.pipes == 1:
            return np.asarray(self.rank_of_stage[0][stage], np.int32)
        return np.asarray(self.rank_of_stage[self.pipe_of_microbatch(microbatch), stage], np.int32)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and self.ranks == other.ranks
            and self.first_microbatch == other.first_microbatch
            and np.array_equal(self.rank_of_stage, other.rank_of_stage)
        )

    __hash__ = None  # type: ignore[assignment]


def linear(ranks: int, microbatches: int) -> Placement:
    """Stage s on rank s."""
    return loop(ranks, microbatches, 1)


def loop(ranks: int, microbatches: int, chunks: int) -> Placement:
    """Chunk j of rank r is stage j * P + r."""
    return Placement(np.tile(np.arange(ranks, dtype=np.int32), chunks)[None, :], (0, microbatches), ranks)


def waves(ranks: int, microbatches: int, turns: int) -> Placement:
    """A snake of ``turns`` V shapes: 0 .. P-1, P-1 .. 0, and again (Hanayo)."""
    up = np.arange(ranks, dtype=np.int32)
    return Placement(np.tile(np.concatenate([up, up[::-1]]), turns)[None, :], (0, microbatches), ranks)


def v_shape(ranks: int, microbatches: int) -> Placement:
    """Rank r holds stage r and stage 2P-1-r."""
    return waves(ranks, microbatches, 1)
