"""Numbers microbatches: each op takes the next one on its chunk, first in first out, unless the text names one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int8, Int64, repeat
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind

_QUEUES = int(TURN.max()) + 1
"""Number of queues on a chunk: ops of each `TURN` are numbered on their own."""
_BY_BACKWARD = np.array([kind in (OpKind.I, OpKind.B, OpKind.R) for kind in OpKind])
"""[kinds] whether ops of a kind take the segments of a microbatch in the order of its backwards."""


@dataclass(frozen=True)
class RankOps:
    """The ops of one rank, in order.

    kind: [ops]. chunk: [ops], -1 for a W of any chunk. explicit: [ops] microbatch that the text names, or -1.
    segments: number of segments of a microbatch, which are consecutive microbatches here. Backwards and R take the
        segments of a microbatch from last to first.
    """

    kind: Int8
    chunk: Int64
    explicit: Int64
    segments: int = 1


@dataclass(frozen=True)
class NumberedOps:
    """Chunks and microbatches of the ops of one rank.

    chunk: [ops]. microbatch: [ops] counted within the pipe.
    starved: [n] rows of the W for which no input gradient is pending.
    """

    chunk: Int64
    microbatch: Int64
    starved: Int64


def number_microbatches(rows: RankOps) -> NumberedOps:
    """Number the ops of one rank.

    An op without an explicit microbatch takes the lowest one that no earlier op of its queue has taken. If no op of the
    queue has an ``@``, this is the number of earlier ops. A W takes the oldest pending input gradient of its chunk, or
    of the rank if it names no chunk.
    """
    backward, named = _BY_BACKWARD[rows.kind], rows.explicit >= 0
    if rows.segments > 1:  # backwards are counted in the order in which they run; `@` names the segment
        turn = np.where(backward & named, reversed_segments(rows.explicit, rows.segments), rows.explicit)
        rows = replace(rows, explicit=turn)
    microbatch = _count_up(rows)
    if named.any():
        _respect_named(rows, named, microbatch)
    if rows.segments > 1:
        microbatch[backward] = reversed_segments(microbatch[backward], rows.segments)
    chunk = rows.chunk.copy()
    weights = np.flatnonzero(rows.kind == OpKind.W)
    if not weights.size:
        return NumberedOps(chunk, microbatch, weights)
    free = chunk[weights] < 0
    if named[weights].any() or (free.any() and not free.all()):
        source, starved = _match_one_by_one(rows, microbatch)
    elif free.all():
        source, starved = _match_oldest(weights, np.flatnonzero(rows.kind == OpKind.I))
    else:
        source, starved = _match_by_chunk(rows, weights)
    fed = weights[source >= 0]
    chunk[fed], microbatch[fed] = rows.chunk[source[source >= 0]], microbatch[source[source >= 0]]
    return NumberedOps(chunk, microbatch, starved)


def reversed_segments(microbatch: Int64, segments: int) -> Int64:
    """Microbatches with the segments of each in reverse order: segment j of k becomes segment k - 1 - j.

    Maps a segment to the turn of its backward, and a turn to its segment. microbatch: any shape.
    """
    within = microbatch % segments
    return np.asarray(microbatch - within + (segments - 1 - within), np.int64)


def _count_up(rows: RankOps) -> Int64:
    """[ops] number of earlier ops in the queue of each op."""
    return occurrences_before((rows.chunk + 1) * _QUEUES + TURN[rows.kind])


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
    keys = rows.chunk * _QUEUES + TURN[rows.kind]
    for key in np.unique(keys[named]):
        queue = np.flatnonzero(keys == key)
        if named[queue].all():
            microbatch[queue] = rows.explicit[queue]
        else:
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


def _match_oldest(weights: Int64, inputs: Int64) -> tuple[Int64, Int64]:
    """The k-th W of the rank takes the k-th I, which must come before it.

    weights, inputs: rows of the W and the I. Returns for each W the row of its I or -1, and the rows of starved W.
    """
    source = np.full(weights.size, -1, np.int64)
    both = min(weights.size, inputs.size)
    source[:both] = np.where(inputs[:both] < weights[:both], inputs[:both], -1)
    return source, weights[source < 0]


def _match_by_chunk(rows: RankOps, weights: Int64) -> tuple[Int64, Int64]:
    """The k-th W of a chunk takes the k-th I of that chunk, which must come before it. Returns as `_match_oldest`."""
    inputs = np.flatnonzero(rows.kind == OpKind.I)
    inputs = inputs[np.argsort(rows.chunk[inputs], kind="stable")]
    chunk_of_input, chunk_of_weight = rows.chunk[inputs], rows.chunk[weights]
    nth = np.searchsorted(chunk_of_input, chunk_of_weight) + occurrences_before(chunk_of_weight)
    there = nth < np.searchsorted(chunk_of_input, chunk_of_weight, side="right")
    source = np.full(weights.size, -1, np.int64)
    source[there] = inputs[nth[there]]
    source[source > weights] = -1
    return source, weights[source < 0]


def _match_one_by_one(rows: RankOps, microbatch: Int64) -> tuple[Int64, Int64]:
    """The general case, in which some W name a chunk or a microbatch. Returns as `_match_oldest`."""
    pending: dict[int, OrderedDict[int, int]] = {}  # by chunk: microbatch -> row of its input gradient, oldest first
    source: list[int] = []
    starved: list[int] = []
    columns = zip(rows.kind.tolist(), rows.chunk.tolist(), rows.explicit.tolist(), microbatch.tolist(), strict=True)
    for row, (kind, chunk, explicit, numbered) in enumerate(columns):
        if kind == OpKind.I:
            pending.setdefault(chunk, OrderedDict())[numbered] = row
        elif kind == OpKind.W:
            source.append(_take(pending, chunk, explicit))
            if source[-1] < 0:
                starved.append(row)
    return np.array(source, np.int64), np.array(starved, np.int64)


def _take(pending: dict[int, OrderedDict[int, int]], chunk: int, explicit: int) -> int:
    """Take the row of the pending input gradient that a W uses; -1 if there is none."""
    queues = [q for q in (pending.values() if chunk < 0 else [pending.get(chunk)]) if q]
    if not queues:
        return -1
    if explicit >= 0:
        return queues[0].pop(explicit, -1)
    oldest = min(queues, key=lambda queue: next(iter(queue.values())))
    return oldest.popitem(last=False)[1]
