"""A bound of the bytes of the fullest rank, for many plans of one placement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.price.part_table import LEVELS
from schedc.planner.search.held_counts import ClaimedPeaks
from schedc.planner.search.placed_counts import PlacedCounts

_LEVEL_NAMES = [str(level) for level in LEVELS]


class HeldOfRanks:
    """What ranks hold of one microbatch, for prefixes and levels of recomputation.

    whole: [prefixes, levels, P] bytes of all stages of a rank: each holds one microbatch when the last forward of that
    microbatch is done. least: [prefixes, levels, P] those of the stage of a rank that holds least.
    """

    def __init__(
        self, counts: PlacedCounts, held: Floats, pending: Floats, levels: Sequence[tuple[str, str]], splits: bool
    ) -> None:
        """held: [prefixes, levels, kinds] by `LEVELS`; pending: [prefixes, kinds] between I and W."""
        own = counts.placement.stage_of_chunk
        waiting = pending @ counts.of_stage.T
        whole, least = [], []
        for level, where in levels:
            mask = counts.applies(where)
            plain, kept = (held[:, number] @ counts.of_stage.T for number in (0, _LEVEL_NAMES.index(level)))
            stages = np.where(mask > 0, kept, plain)
            whole.append(stages @ counts.on_rank.T)
            either = np.minimum(stages, waiting) if splits else stages
            least.append(np.where(own >= 0, either[:, np.maximum(own, 0)], np.inf).min(axis=2))
        self.whole, self.least = np.stack(whole, axis=1), np.stack(least, axis=1)


def bytes_of_counts(
    counts: PlacedCounts, parameters: Floats, held: HeldOfRanks, peaks: Sequence[Sequence[ClaimedPeaks]]
) -> Floats:
    """[prefixes, orders, levels, zeros] bytes of the fullest rank, at least, with the layout of ``counts``.

    parameters: [prefixes, zeros, kinds] bytes of a part. peaks: [orders][prefixes] what the schedule's file claims.
    """
    own = parameters @ (counts.on_rank @ counts.of_stage).T  # [prefixes, zeros, P]
    result = []
    for of_order in peaks:
        claimed = np.stack([peak.of_rank for peak in of_order])[:, None, :]
        largest = np.array([peak.largest for peak in of_order], np.float64)[:, None, None]
        every = np.maximum(held.whole, claimed * held.least)
        fullest = (own[:, None] + every[:, :, None]).max(axis=3)
        some = (own[:, None] + (largest * held.least)[:, :, None]).min(axis=3)
        result.append(np.maximum(fullest, some))
    return np.stack(result, axis=1)
