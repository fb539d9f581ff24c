"""Numbers microbatches: each op takes the next one on its chunk, first in first out, unless the text names one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int8, Int64, bincount, repeat
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind

_QUEUES = int(TURN.max()) + 1
"""Number of queues on a chunk: ops of each `TURN` are numbered on their own."""
_BY_BACKWARD = np.array([kind in (OpKind.I, OpKind.B, OpKind.R) for kind in OpKind])
"""[kinds] whether ops of a kind take the segments of a microbatch in the order of its backwards."""


@dataclass(frozen=True)
class RankOps:
    """The ops of some ranks, rank by rank in order.

    kind: [ops]. rank: [ops] numbers, ascending. chunk: [ops], -1 for a W of any chunk. explicit: [ops] microbatch that
    the text names, or -1. segments: number of segments of a microbatch, which are consecutive microbatches here.
    Backwards and R take the segments of a microbatch from last to first.
    """

    kind: Int8
    rank: Int64
    chunk: Int64
    explicit: Int64
    segments: int = 1


@dataclass(frozen=True)
class NumberedOps:
    """Chunks and microbatches of the ops of some ranks.

    chunk: [ops]. microbatch: [ops] counted within the pipe.
    starved: [n] rows of the W for which no input gradient is pending, ascending.
    """

    chunk: Int64
    microbatch: Int64
    starved: Int64


def number_microbatches(rows: RankOps) -> NumberedOps:
    """Number the ops of some ranks, each rank on its own.

    An op without an explicit microbatch takes the lowest one that no earlier op of its queue has taken. If no op of the
    queue has an ``@``, this is the number of earlier ops. A W takes the oldest pending input gradient of its chunk, or
    of the rank if it names no chunk.
    """
    backward, named = _BY_BACKWARD[rows.kind], rows.explicit >= 0
    if rows.segments > 1:  # backwards are counted in the order in which they run; `@` names the segment
        turn = np.where(backward & named, reversed_segments(rows.explicit, rows.segments), rows.explicit)
        rows = replace(rows, explicit=turn)
    microbatch = occurrences_before(_queue(rows))
    if named.any():
        _respect_named(rows, named, microbatch)
    if rows.segments > 1:
        microbatch[backward] = reversed_segments(microbatch[backward], rows.segments)
    chunk = rows.chunk.copy()
    weights = np.flatnonzero(rows.kind == OpKind.W)
    if not weights.size:
        return NumberedOps(chunk, microbatch, weights)
    source = _inputs_of(rows, weights, microbatch)
    fed = weights[source >= 0]
    chunk[fed], microbatch[fed] = rows.chunk[source[source >= 0]], microbatch[source[source >= 0]]
    return NumberedOps(chunk, microbatch, weights[source < 0])


def reversed_segments(microbatch: Int64, segments: int) -> Int64:
    """Microbatches with the segments of each in reverse order: segment j of k becomes segment k - 1 - j.

    Maps a segment to the turn of its backward, and a turn to its segment. microbatch: any shape.
    """
    within = microbatch % segments
    return np.asarray(microbatch - within + (segments - 1 - within), np.int64)


def _queue(rows: RankOps) -> Int64:
    """[ops] number of the queue of each op, not negative."""
    chunks = int(rows.chunk.max(initial=0)) + 2
    rank = rows.rank - rows.rank[:1].sum()
    return np.asarray((rank * chunks + rows.chunk + 1) * _QUEUES + TURN[rows.kind], np.int64)


def occurrences_before(keys: Int64) -> Int64:
    """[n] how often the key of each element occurs before it. keys: [n], not negative."""
    small: npt.NDArray[np.uint16] | Int64 = keys.astype(np.uint16) if keys.size and keys.max() < 1 << 16 else keys
    order = np.argsort(small, kind="stable")  # with 16 bits numpy takes a radix sort, which is linear
    ordered = small[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if keys.size else np.empty(0, int)
    lengths = np.diff(np.append(starts, keys.size))
    counts = np.empty(keys.size, np.int64)
    counts[order] = np.arange(keys.size) - repeat(starts, lengths)
    return counts


def _respect_named(rows: RankOps, named: npt.NDArray[np.bool_], microbatch: Int64) -> None:
    """Renumber in place the queues in which ``@`` names a microbatch."""
    keys = _queue(rows)
    order = np.argsort(keys, kind="stable")
    for queue in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        if named[queue].all():
            microbatch[queue] = rows.explicit[queue]
        elif named[queue].any():
            microbatch[queue] = _lowest_free(rows.explicit[queue].tolist())


def _lowest_free(explicit: Sequence[int]) -> list[int]:
    """The explicit numbers; each -1 becomes the lowest number that no earlier element has taken."""
    taken: set[int] = set()
    numbers: list[int] = []
    lowest = 0
    for wanted in explicit:
        while wanted < 0 and lowest in taken:
            lowest += 1
        chosen = lowest if wanted < 0 else wanted
        taken.add(chosen)
        numbers.append(chosen)
    return numbers


def _inputs_of(rows: RankOps, weights: Int64, microbatch: Int64) -> Int64:
    """[W] row of the I that each W takes, -1 where none is pending. weights: [W] rows; microbatch: [ops]."""
    rank, ranks = rows.rank - rows.rank[0], int(rows.rank[-1] - rows.rank[0]) + 1
    free = rows.chunk[weights] < 0
    of_rank = bincount(rank[weights], minlength=ranks)
    any_chunk = bincount(rank[weights], free, minlength=ranks)
    named = bincount(rank[weights], rows.explicit[weights] >= 0, minlength=ranks)
    single = (named > 0) | ((any_chunk > 0) & (any_chunk < of_rank))
    chunk = np.where((any_chunk > 0)[rank], 0, rows.chunk)  # where every W takes any chunk, a rank has one queue
    source = _match_in_turn(rank * (int(chunk.max(initial=0)) + 1) + chunk, rows.kind, weights)
    for number in np.flatnonzero(single).tolist():
        own = slice(*np.searchsorted(rank, [number, number + 1]).tolist())
        found = _match_one_by_one(rows.kind[own], rows.chunk[own], rows.explicit[own], microbatch[own])
        source[rank[weights] == number] = np.where(found >= 0, found + own.start, -1)
    return source


def _match_in_turn(queue: Int64, kind: Int8, weights: Int64) -> Int64:
    """The k-th W of a queue takes its k-th I, which must come before it. queue, kind: [ops]; the rest as above."""
    inputs = np.flatnonzero(kind == OpKind.I)
    inputs = inputs[np.argsort(queue[inputs], kind="stable")]
    ordered, queue_of_weight = queue[inputs], queue[weights]
    first, stop = (np.searchsorted(ordered, queue_of_weight, side=side) for side in ("left", "right"))
    nth = first + occurrences_before(queue_of_weight)
    source = np.full(weights.size, -1, np.int64)
    there = nth < stop
    source[there] = inputs[nth[there]]
    source[source > weights] = -1
    return source


def _match_one_by_one(kind: Int8, chunk: Int64, explicit: Int64, microbatch: Int64) -> Int64:
    """The general case of one rank, in which some W name a chunk or a microbatch. All [ops]; gives [W] rows or -1."""
    pending: dict[int, OrderedDict[int, int]] = {}  # by chunk: row of an input gradient -> its microbatch, oldest first
    source: list[int] = []
    columns = zip(kind.tolist(), chunk.tolist(), explicit.tolist(), microbatch.tolist(), strict=True)
    for row, (letter, queue, wanted, numbered) in enumerate(columns):
        if letter == OpKind.I:
            pending.setdefault(queue, OrderedDict())[row] = numbered
        elif letter == OpKind.W:
            source.append(_take(pending, queue, wanted))
    return np.array(source, np.int64)


def _take(pending: dict[int, OrderedDict[int, int]], chunk: int, explicit: int) -> int:
    """Take the row of the pending input gradient that a W uses; -1 if there is none."""
    queues = [q for q in (pending.values() if chunk < 0 else [pending.get(chunk)]) if q]
    if not queues:
        return -1
    oldest = min(queues, key=lambda queue: next(iter(queue)))
    row = next((row for row, microbatch in oldest.items() if explicit in (-1, microbatch)), -1)
    oldest.pop(row, None)
    return row
