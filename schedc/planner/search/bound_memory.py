"""A bound of the bytes of the fullest rank, for many plans of one placement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.layout.parts import DECODER, WORK
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


def even_bytes(
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


def any_bytes(
    counts: PlacedCounts, parameters: Floats, held: Floats, levels: Sequence[tuple[str, str]], claimed: Int64
) -> Floats:
    """[prefixes, levels, zeros] bytes of the fullest rank, at least, whatever the layout.

    The mean of all ranks, each with one microbatch. With a stage per rank a rank holds ``claimed`` [prefixes, P]
    microbatches of each layer: so many bytes per layer, that all ranks together have room for all layers.
    held: [prefixes, levels, kinds] by `LEVELS`.
    """
    total = counts.of_stage.sum(axis=0)
    own = parameters @ total / counts.ranks
    result = []
    for level, where in levels:
        number = _LEVEL_NAMES.index(level) if where == "all" else None
        each = held.min(axis=1) if number is None else held[:, number]
        bytes = own + (each @ total / counts.ranks)[:, None]
        if counts.linear:
            bytes = np.maximum(bytes, _room_for_layers(parameters, each, total, claimed))
        result.append(bytes)
    return np.stack(result, axis=1)


_LAYERS = [WORK.index(kind) for kind in DECODER]


def _room_for_layers(parameters: Floats, held: Floats, total: Floats, claimed: Int64) -> Floats:
    """[prefixes, zeros] bytes U with: layers <= the sum over ranks of U / bytes of a layer there."""
    there = [kind for kind in _LAYERS if total[kind]]
    weights, activations = parameters[..., there].min(axis=2), held[:, there].min(axis=1)
    per_layer = weights[:, :, None] + (np.maximum(claimed, 1) * activations[:, None])[:, None, :]
    return np.asarray(total[there].sum() / (1.0 / per_layer).sum(axis=2))
