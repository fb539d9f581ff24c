"""Which rank holds which stage, for each pipe of a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from schedc.ir.arrays import Int32, bincount


@dataclass(frozen=True, eq=False)
class Placement:
    """Stages on ranks.

    A pipe is one direction of the schedule with its own copy of every stage. Most schedules have one;
    DualPipe and Chimera have two, so that a stage lives on two ranks whose gradients are to be summed.

    rank_of_stage: [pipes, stages] rank that holds the stage for that pipe.
    first_microbatch: pipe p owns the microbatches first_microbatch[p] ..< first_microbatch[p + 1].
    ranks: number of ranks, P.
    chunks: the largest number of chunks (stages, over all pipes) on one rank.
    chunk_of: [pipes, stages] number of the chunk on its rank; chunks count by pipe, then by stage.
    stage_of_chunk, pipe_of_chunk: [ranks, chunks] stage and pipe of each chunk; -1 where a rank holds fewer.
    """

    rank_of_stage: Int32
    first_microbatch: tuple[int, ...]
    ranks: int
    pipes: int = field(init=False)
    stages: int = field(init=False)
    microbatches: int = field(init=False)
    chunks: int = field(init=False)
    chunk_of: Int32 = field(init=False)
    stage_of_chunk: Int32 = field(init=False)
    pipe_of_chunk: Int32 = field(init=False)

    def __post_init__(self) -> None:
        flat = self.rank_of_stage.ravel()
        pipes, stages = self.rank_of_stage.shape
        count = bincount(flat, minlength=self.ranks)
        order, chunk = np.argsort(flat, kind="stable"), np.empty(flat.size, np.int32)
        chunk[order] = np.arange(flat.size) - (np.cumsum(count) - count)[flat[order]]
        by_chunk = np.full((2, self.ranks, int(count.max())), -1, np.int32)
        by_chunk[:, flat, chunk] = np.arange(flat.size) % stages, np.arange(flat.size) // stages
        facts = {
            "pipes": int(pipes),
            "stages": int(stages),
            "microbatches": self.first_microbatch[-1],
            "chunks": int(count.max()),
            "chunk_of": chunk.reshape(pipes, stages),
            "stage_of_chunk": by_chunk[0],
            "pipe_of_chunk": by_chunk[1],
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

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
