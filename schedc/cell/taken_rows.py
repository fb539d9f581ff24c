"""Takes a recorded routing for other sizes: for more or fewer layers, microbatches, ranks and rows than it has.

    layer      l of L' is layer l L // L' of the record
    rank       r is rank r mod R of the record
    microbatch a rank takes k microbatches of the record together, k = T' / T rounded: those from k (m + r // R) on
    rows       experts share T' rows as they share those of these microbatches

A rank beyond those of the record so has other microbatches of the same rank, and more rows together spread less, as
longer microbatches do. Microbatches repeat where the record has no more of them. Prefix sums over experts are rounded
down, so that a rank of any number of experts is within a row of its share. A record of the sizes is itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd

import numpy as np

from schedc.cell.recorded_rows import RecordedRows
from schedc.ir.arrays import Int32, Int64


@lru_cache(maxsize=4)
def taken_for(record: RecordedRows, layers: int, microbatches: int, ranks: int, rows: int | None) -> RecordedRows:
    """The record for other sizes, with rows by expert. rows: of a rank's tokens in a microbatch; None: as recorded.

    ranks: a divisor of the experts.
    """
    assert record.by_expert is not None
    known = record.sizes
    if (layers, microbatches, ranks) == known[:3] and rows in (None, known.rows):
        return record
    together = 1 if rows is None else max(1, round(rows / max(known.rows, 1)))
    period = min(microbatches, known.microbatches // gcd(together, known.microbatches))
    taken = np.stack([
        _of_layer(step[layer * known.layers // layers], period, ranks, together, rows)
        for step in record.by_expert
        for layer in range(layers)
    ]).reshape(len(record.by_expert), layers, period, ranks, -1)  # fmt: skip
    of_experts = RecordedRows.of_experts(record.file, taken)
    return replace(of_experts, step=microbatches, known=known)


def _of_layer(recorded: Int32, period: int, ranks: int, together: int, rows: int | None) -> Int32:
    """[period, ranks, experts] of [microbatches, ranks, experts] of the record."""
    count, sources = recorded.shape[:2]
    turn = (np.arange(period)[:, None] + np.arange(ranks) // sources) * together
    source = np.broadcast_to(np.arange(ranks) % sources, turn.shape)
    summed = sum(recorded[(turn + one) % count, source].astype(np.int64) for one in range(together))
    return np.asarray(summed if rows is None else _shared(np.asarray(summed), rows), np.int32)


def _shared(rows: Int64, total: int) -> Int64:
    """[..., experts] ``total`` rows as ``rows`` share theirs; none where these are none."""
    ends = rows.cumsum(axis=-1)
    whole = np.maximum(ends[..., -1:], 1)
    return np.asarray(np.diff(ends * total // whole, axis=-1, prepend=0))
