"""Which microbatch each op takes: first in first out on its chunk, unless the text names one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import repeat
from schedc.ir.ops import TURN, OpKind
from schedc.ir.schedule import Int8, Int64

_QUEUES = int(TURN.max()) + 1
"""Ops are numbered apart by their `TURN`."""
_BY_BACKWARD = np.array([False, True, False, True, True])
"""By op kind: whether ops of it are counted in the order of the backwards."""


@dataclass(frozen=True)
class RankOps:
    """The rows of one rank: kind, chunk (-1: a W of any chunk), and explicit microbatch or -1.

    segments: consecutive microbatches that are segments of one; backwards, and R like them, take those of each last
        first.
    """

    kind: Int8
    chunk: Int64
    explicit: Int64
    segments: int = 1


@dataclass(frozen=True)
class NumberedOps:
    """``chunk`` and ``microbatch`` (counted within the pipe) of each row; ``starved``: W rows with nothing pending."""

    chunk: Int64
    microbatch: Int64
    starved: Int64


def number_microbatches(rows: RankOps) -> NumberedOps:
    """Number the ops of one rank.

    An op without an explicit microbatch takes the lowest one that no earlier op of its queue has taken; without any
    ``@`` on the queue that is the count of the earlier ones. A W takes the oldest pending input gradient: of its
    chunk, or of the rank.
    """
    backward, named = _BY_BACKWARD[rows.kind], rows.explicit >= 0
    if rows.segments > 1:  # backwards are counted by their turn, which `@` does not speak of
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
    """The turn of each segment's backward, the last of a microbatch first; also the segment whose turn it is."""
    within = microbatch % segments
    return np.asarray(microbatch - within + (segments - 1 - within), np.int64)


def _count_up(rows: RankOps) -> Int64:
    """How many earlier rows each row has in its queue on its chunk."""
    return occurrences_before((rows.chunk + 1) * _QUEUES + TURN[rows.kind])


def occurrences_before(keys: Int64) -> Int64:
    """How often the key of each element has come before it."""
    small: npt.NDArray[np.uint16] | Int64 = keys.astype(np.uint16) if keys.size and keys.max() < 1 << 16 else keys
    order = np.argsort(small, kind="stable")  # of 16 bits: a radix sort, linear
    ordered = small[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if keys.size else np.empty(0, int)
    lengths = np.diff(np.append(starts, keys.size))
    counted = np.empty(keys.size, np.int64)
    counted[order] = np.arange(keys.size) - repeat(starts, lengths)
    return counted


def _respect_named(rows: RankOps, named: npt.NDArray[np.bool_], microbatch: Int64) -> None:
    """Renumber, in place, the queues that ``@`` takes part in."""
    keys = rows.chunk * _QUEUES + TURN[rows.kind]
    for key in np.unique(keys[named]):
        queue = np.flatnonzero(keys == key)
        if named[queue].all():
            microbatch[queue] = rows.explicit[queue]
        else:
            microbatch[queue] = _lowest_free(rows.explicit[queue].tolist())


def _lowest_free(explicit: Sequence[int]) -> list[int]:
    """The explicit numbers, and for each -1 the lowest number that none before it has taken."""
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
    """The k-th W of the rank takes the k-th I, which must come before it."""
    source = np.full(weights.size, -1, np.int64)
    both = min(weights.size, inputs.size)
    source[:both] = np.where(inputs[:both] < weights[:both], inputs[:both], -1)
    return source, weights[source < 0]


def _match_by_chunk(rows: RankOps, weights: Int64) -> tuple[Int64, Int64]:
    """The k-th W of a chunk takes the k-th I of that chunk, which must come before it."""
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
    """The general case: some W name a chunk or a microbatch and some do not."""
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
    """Remove and give the row of the pending input gradient that a W takes; -1 if there is none."""
    queues = [q for q in (pending.values() if chunk < 0 else [pending.get(chunk)]) if q]
    if not queues:
        return -1
    if explicit >= 0:
        return queues[0].pop(explicit, -1)
    oldest = min(queues, key=lambda queue: next(iter(queue.values())))
    return oldest.popitem(last=False)[1]
