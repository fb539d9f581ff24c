"""The loop of cells that send before their ends, under many costs, for numba (see `schedc.step.numba_kernels`)."""

from __future__ import annotations

from typing import Any

import numpy as np

RANK, INPUT, GRADIENT, INPUT_FAR, GRADIENT_FAR, OUTPUT, INPUT_GRADIENT, BEHIND, WATCHED = range(9)
"""Columns of the table that `advance_messages` walks; a row is a step.

RANK: the step's rank. INPUT, GRADIENT: the rows of the outputs that it waits for. INPUT_FAR, GRADIENT_FAR: 1 where they
come from another rank. OUTPUT, INPUT_GRADIENT: the rows that keep its own outputs, or -1. BEHIND: 1 where its gradient
leaves no sooner than its output. WATCHED: the row of the answer that gets its end, or -1.
"""

WORK_ROWS = 4
"""Rows of work space behind those of ranks and outputs. The first stays 0: nothing to wait for. The others are for when
the messages of a step arrive, and for what it gives."""


def advance_messages(
    table: Any, kind: Any, uses: Any, delay: Any, latency: Any, value: Any, end: Any, watched: Any
) -> None:
    """Runs every step under K costs, as many at a time as ``value`` is wide.

    table: [n, 9]; kind: [n] row of the step's delays; uses: [kinds, 2] whether a kind depends on its two messages.
    delay: [kinds, 9, K] as in `schedc.cell.delays`, output by output; latency: [K] of a message between ranks.
    value: [rows, width] work space (`WORK_ROWS`). Filled in: end [P, K], the end of each rank's last step, and
    watched [.., K].
    """
    ranks, total, width = end.shape[0], latency.size, value.shape[1]
    first, second, output = value[value.shape[0] - 3], value[value.shape[0] - 2], value[value.shape[0] - 1]
    later, far = np.empty((delay.shape[0] * 9, width)), np.zeros((2, width))
    for low in range(0, total, width):
        count = min(width, total - low)
        for of in range(delay.shape[0]):
            later[9 * of : 9 * of + 9, :count] = delay[of, :, low : low + count]
        far[1, :count] = latency[low : low + count]
        value[:ranks] = 0.0
        for step in range(table.shape[0]):
            own, of = value[table[step, 0]], kind[step]
            for place in range(2):
                if uses[of, place]:
                    there, late = value[table[step, 1 + place]], table[step, 3 + place]
                    arrival = first if place == 0 else second
                    for k in range(count):
                        arrival[k] = there[k] + far[late, k]
            for number in (1, 2, 0):  # the end last: the others read when the rank was free
                row = table[step, 4 + number] if number else table[step, 0]
                if row < 0:
                    continue
                at = 9 * of + 3 * number
                for k in range(count):
                    output[k] = own[k] + later[at, k]
                for place in range(2):
                    if uses[of, place]:
                        arrival = first if place == 0 else second
                        for k in range(count):
                            time = arrival[k] + later[at + 1 + place, k]
                            output[k] = time if time > output[k] else output[k]
                out = value[row]
                for k in range(count):
                    out[k] = output[k]
            if table[step, 7]:
                one, two = value[table[step, 5]], value[table[step, 6]]
                for k in range(count):
                    two[k] = one[k] if one[k] > two[k] else two[k]
            if table[step, 8] >= 0:
                watched[table[step, 8], low : low + count] = own[:count]
        end[:, low : low + count] = value[:ranks, :count]
