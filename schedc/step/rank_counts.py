"""Counts of each rank at one size: peaks of activations and deferred weight gradients, and messages."""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Int64
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory

_PEAKS = ("peak_activations", "peak_activations_between", "peak_pending_weight")
COUNTS = (*_PEAKS, "messages_sent")
TOTALS = ("messages", "busiest_link")


def counts(cells: Dependencies) -> dict[str, Int64]:
    """By name [P] the counts of `COUNTS`, and [1] those of `TOTALS`, at one size. All are plain numbers."""
    memory = measure_memory(cells.schedule, dependencies=cells)
    sent = _messages(cells)
    peaks: dict[str, Int64] = {name: getattr(memory, name) for name in _PEAKS}
    link = (sent + sent.T).max(keepdims=True)[0]
    return {**peaks, "messages_sent": sent.sum(axis=1), "messages": sent.sum(keepdims=True)[0], "busiest_link": link}


def _messages(cells: Dependencies) -> Int64:
    """[P, P] messages of a step from each rank to each: activations and gradients together."""
    ranks = cells.schedule.ranks
    table = np.zeros((ranks, ranks), np.int64)
    for producer, remote in zip(cells.producers, cells.remote, strict=True):
        np.add.at(table, (cells.rank[producer[remote]], cells.rank[remote]), 1)
    return table
