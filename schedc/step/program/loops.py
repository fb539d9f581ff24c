"""The passes' loops that numba compiles where it is worth it; numpy's way stands beside each call, with equal results.

They are plain functions of arrays; what the arrays mean is said in `schedc.step.program.insert_communication`. Compiled
ones are kept with the kinds below as constants, until this file changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedc.ir.program import InstructionKind

_CELL = int(InstructionKind.CELL)
_SEND, _RECV, _WAIT, _REDUCE = (
    int(kind) for kind in (InstructionKind.SEND, InstructionKind.RECV, InstructionKind.WAIT, InstructionKind.REDUCE)
)


def place_posts(
    by_end: Any, rank: Any, rank_start: Any, producer: Any, consumer: Any, ahead: int, free: Any, post: Any, gap: Any
) -> None:
    """Fills ``post`` and ``gap``, [2 * messages], rank by rank.

    free: [P] the first place of each rank in them. ahead: how many cells before its latest place a receive is posted.
    """
    ranks = rank_start.size - 1
    first, here, least = np.empty(ranks, np.int64), np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for own in range(ranks):  # the first gap of each rank, the gap that the walk is in, and the least for a post
        first[own] = here[own] = least[own] = rank_start[own] + own
    message = 0
    for step in range(by_end.size):
        cell = by_end[step]
        own = rank[cell]
        here[own] += 1
        while message < producer.size and producer[message] == cell:
            least[own] = here[own]
            post[free[own]], gap[free[own]] = 2 * message, here[own]
            free[own] += 1
            other = rank[consumer[message]]
            least[other] = max(least[other], max(here[other] - ahead, first[other]))
            post[free[other]], gap[free[other]] = 2 * message + 1, least[other]
            free[other] += 1
            message += 1


def place_send_waits(order: Any, rank: Any, rank_start: Any, number: Any, producer: Any, gap: Any) -> None:
    """Raises ``gap``, [messages], to the gap before the sender's first cell after the consumer in ``order``."""
    here = rank_start[:-1] + np.arange(rank_start.size - 1)
    for step in range(order.size):
        cell = order[step]
        here[rank[cell]] += 1
        for channel in range(2):
            message = number[channel, cell]
            if message >= 0:
                sender = rank[producer[message]]
                gap[message] = max(gap[message], here[sender])


def join_loop(
    producer: Any, consumer: Any, place: Any, follows: Any, start: Any, end: Any, p2p: float, rounding: float,
    gap: Any, batch: Any,
) -> None:  # fmt: skip
    """Fills ``batch``, [messages], which is -1 before, and moves the receives of first messages in ``gap``."""
    count = 0
    for first in range(producer.size):
        after = follows[place[first, 1]]
        # what is the second message of a batch already is not the first of another
        if batch[first] >= 0 or after < 0 or after % 2 == 1 or follows[place[first, 0]] != after + 1:
            continue
        second = after // 2
        if producer[second] >= consumer[first] or gap[place[second, 1]] != gap[place[first, 0]]:
            continue
        left, leaves = end[producer[first]], end[producer[second]]
        if leaves <= left + rounding or (p2p > 0 and leaves + p2p <= start[consumer[first]]):
            batch[first] = batch[second] = count
            count += 1
            gap[place[first, 1]] = gap[place[second, 0]]


def place_events(
    kind: Any, rank_start: Any, place_of: Any, gap: Any, place: Any, own_kind: Any, slot: Any, kinds: Any
) -> None:
    """Fills ``slot``, [events], the rows that events get, and ``kinds``, [n + events], the kinds of all rows.

    kind: [n] of the instructions; place_of: [kinds] their places in a gap. gap, place: [events] ascending together.
    own_kind: [events] START or JOIN. See `schedc.step.program.insert_works`.
    """
    event, here = 0, 0
    for rank in range(rank_start.size - 1):
        for row in range(rank_start[rank], rank_start[rank + 1]):
            while event < gap.size and gap[event] == here and place[event] < place_of[kind[row]]:
                slot[event], kinds[row + event] = row + event, own_kind[event]
                event += 1
            kinds[row + event] = kind[row]
            here += kind[row] <= _CELL
        row = rank_start[rank + 1]
        while event < gap.size and gap[event] == here:
            slot[event], kinds[row + event] = row + event, own_kind[event]
            event += 1
        here += 1


def fill(
    rank_start: Any, number: Any, compute: Any, post: Any, gap: Any, waiting: Any, send_wait: Any, reduced: Any,
    kind: Any, thing: Any, stream_start: Any,
) -> None:  # fmt: skip
    """Fills ``kind`` and ``thing``, [instructions], and ``stream_start``, [P + 1].

    compute: [cells] kinds of the cells. waiting: [messages] in order of the gaps in which their sends are waited for.
    """
    cells, messages = compute.size, waiting.size
    row, posted, waited, summed = 0, 0, 0, 0
    for rank in range(rank_start.size - 1):
        for cell in range(rank_start[rank], rank_start[rank + 1] + 1):
            while posted < gap.size and gap[posted] == cell + rank:
                kind[row], thing[row] = _SEND + post[posted] % 2, cells + post[posted]
                row, posted = row + 1, posted + 1
            while waited < messages and send_wait[waiting[waited]] == cell + rank:
                kind[row], thing[row] = _WAIT, cells + 2 * waiting[waited]
                row, waited = row + 1, waited + 1
            if cell == rank_start[rank + 1]:
                break
            one, other = number[0, cell], number[1, cell]
            for message in (min(one, other), max(one, other)):
                if message >= 0:
                    kind[row], thing[row] = _WAIT, cells + 2 * message + 1
                    row += 1
            kind[row], thing[row] = compute[cell], cell
            row += 1
        for _ in range(reduced[rank]):
            kind[row], thing[row] = _REDUCE, cells + 2 * messages + summed
            row, summed = row + 1, summed + 1
        stream_start[rank + 1] = row


def sort_by_inputs(read: Any, readers: Any, missing: Any, order: Any) -> int:
    """Fills ``order``, [n], with instructions behind their inputs; gives the number of those that can be reached.

    Instruction i is an input of readers[read[i]] ..< readers[read[i + 1]]. missing: [n] the number of inputs of each.
    """
    reached = 0
    for i in range(len(missing)):
        if missing[i] == 0:
            order[reached] = i
            reached += 1
    done = 0
    while done < reached:
        for j in range(read[order[done]], read[order[done] + 1]):
            reader = readers[j]
            missing[reader] -= 1
            if missing[reader] == 0:
                order[reached] = reader
                reached += 1
        done += 1
    return reached
