"""The loops that choose offloads, for `place_offload`. Where compilation pays, numba compiles the loops.

They are plain functions of arrays, and walk the ranks ``low`` to ``high``, without ``high``. A stay moves where
0 <= left < back. Shared arguments: rank_start: [P + 1] first cell of each rank. first: [P + 1] first stay of each rank.
made, used, bytes, left, back: [stays]. by_use: [stays] those of each rank in the order of their uses.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def choose_moves_loop(
    low: int, high: int, held: Any, room: Any, rank_start: Any, first: Any, made: Any, used: Any, bytes: Any,
    present: Any, left: Any,
) -> None:  # fmt: skip
    """Fills ``left`` of the stays that leave, and lowers ``held``. The stay with the last use leaves first.

    present: [cells] work space, for the stay on the device that each cell uses; -1 for none.
    """
    for own in range(low, high):
        stay, last, moved, away = first[own], -1, 0, 0.0
        present[rank_start[own] : rank_start[own + 1]] = -1
        for cell in range(rank_start[own], rank_start[own + 1]):
            if present[cell] <= -2:  # a stay comes back for this cell
                moved -= 1
                away = away - bytes[-2 - present[cell]] if moved else 0.0
            while stay < first[own + 1] and made[stay] < cell:
                present[used[stay]] = stay
                last = max(last, used[stay])
                stay += 1
            while held[cell] - away > room[own] * (1 + 1e-12):
                while last > cell and present[last] < 0:
                    last -= 1
                if last <= cell:
                    break
                leaving = present[last]
                present[last] = -2 - leaving
                left[leaving] = cell
                moved += 1
                away += bytes[leaving]
            held[cell] -= away


def give_time(
    low: int, high: int, held: Any, most: Any, first: Any, made: Any, used: Any, bytes: Any, left: Any, back: Any,
    by_use: Any, start: Any, end: Any, time_out: float, time_back: float, latest: Any,
) -> None:  # fmt: skip
    """Raises ``left`` and lowers ``back`` where there is room. latest: [stays] work space."""
    for own in range(low, high):
        limit, free = most[own] * (1 + 1e-12), 0.0
        for stay in range(first[own], first[own + 1]):
            if left[stay] >= 0:
                free = max(free, end[made[stay]]) + bytes[stay] * time_out
                while left[stay] < back[stay] and end[left[stay] - 1] < free:
                    if held[left[stay]] + bytes[stay] > limit:
                        break
                    held[left[stay]] += bytes[stay]
                    left[stay] += 1
        before = np.inf
        for place in range(first[own + 1] - 1, first[own] - 1, -1):
            stay = by_use[place]
            if 0 <= left[stay] < back[stay]:
                before = min(start[used[stay]], before) - bytes[stay] * time_back
                latest[stay] = before
        for place in range(first[own], first[own + 1]):
            stay = by_use[place]
            while 0 <= left[stay] < back[stay] and end[back[stay] - 1] > latest[stay]:
                if held[back[stay] - 1] + bytes[stay] > limit:
                    break
                back[stay] -= 1
                held[back[stay]] += bytes[stay]


def least_step(
    low: int, high: int, rank_start: Any, first: Any, made: Any, used: Any, bytes: Any, left: Any, back: Any,
    by_use: Any, start: Any, duration: Any, tail: Any, time_out: float, time_back: float, comes: Any, follows: Any,
    gone: Any, came: Any,
) -> float:  # fmt: skip
    """The least that the step can take with these moves, or 0 where no cell starts later than without them.

    start: [cells] in the step without moves, which no cell precedes. tail: [cells] the least time from the end of a
    cell to that of the step. Arithmetic and order equal `schedc.step.work_runs.run_with_works`: if all ranks give 0,
    the step has the times of a step without moves.

    Work space: comes: [cells] the first fetch that starts in front of the cell, follows: [stays] the next one there; -1
    for none. gone, came: [cells] when the offloads and the fetch that are joined there end.
    """
    least = 0.0
    for own in range(low, high):
        cells = slice(rank_start[own], rank_start[own + 1])
        comes[cells], gone[cells], came[cells] = -1, 0.0, 0.0
        for place in range(first[own + 1] - 1, first[own] - 1, -1):
            stay = by_use[place]
            if 0 <= left[stay] < back[stay]:
                follows[stay] = comes[back[stay]]
                comes[back[stay]] = stay
        stay, free_out, free_back, now = first[own], 0.0, 0.0, 0.0
        for cell in range(rank_start[own], rank_start[own + 1]):
            while stay < first[own + 1] and made[stay] < cell:
                if 0 <= left[stay] < back[stay]:
                    free_out = max(now, free_out) + bytes[stay] * time_out
                    gone[left[stay]] = max(gone[left[stay]], free_out)
                stay += 1
            now = max(now, gone[cell])
            fetch = comes[cell]
            while fetch >= 0:
                free_back = max(now, free_back) + bytes[fetch] * time_back
                came[used[fetch]] = free_back
                fetch = follows[fetch]
            now = max(now, start[cell], came[cell])
            late = now > start[cell]
            now += duration[cell]
            if late:
                least = max(least, now + tail[cell])
    return least


def tails(order: Any, previous: Any, producers: Any, remote: Any, duration: Any, latency: float, tail: Any) -> None:
    """Fills ``tail``, [cells], 0 before: the longest path from the end of each cell to the end of the step.

    Arguments as for `schedc.step.numba_kernels.ends`.
    """
    for step in range(order.size - 1, -1, -1):
        cell = order[step]
        spent = tail[cell] + duration[cell]
        if previous[cell] >= 0:
            tail[previous[cell]] = max(tail[previous[cell]], spent)
        for row in range(2):
            producer = producers[row, cell]
            if producer >= 0:
                tail[producer] = max(tail[producer], spent + latency if remote[row, cell] else spent)
