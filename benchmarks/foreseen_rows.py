"""Rows that `waterfall.py` predicts with: drawn at the stated skew, by other random numbers than those of its steps.

Two steps are drawn for each layer. The compiler lends and copies experts by the rows of the first one; the second is
the step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from drawn_routing import LaneRows, drawn, expert_rows, rank_rows, sent_rows

from schedc.cell.recorded_rows import RecordedRows

_FAR = 1 << 20
"""The first turn of these draws: no step that is measured comes so far."""


class HomeRows(NamedTuple):
    """Rows of a step whose experts are computed at home, in the mean over layers and microbatches.

    fullest: rows of the fullest rank, over the mean. sent: rows of a dispatch per token, for the rank that sends or
    gets most.
    """

    fullest: float
    sent: LaneRows


@lru_cache(maxsize=4)
def foreseen(rho: float, layers: int, microbatches: int, tokens: int) -> RecordedRows:
    """Both steps at this skew, as a record by expert. tokens: of a rank."""
    turns = np.arange(2 * microbatches).reshape(2, microbatches) + _FAR
    rows = [
        [[expert_rows(drawn(layer, turn, rho, tokens)) for turn in step] for layer in range(layers)]
        for step in turns.tolist()
    ]
    return RecordedRows.of_experts("foreseen", np.array(rows, np.int32))


def at_home(method: str, rho: float, layers: int, microbatches: int, tokens: int) -> HomeRows:
    """The second step where nothing is lent or copied."""
    turns = range(_FAR + microbatches, _FAR + 2 * microbatches)
    each = [drawn(layer, turn, rho, tokens) for layer in range(layers) for turn in turns]
    sent = np.mean([sent_rows(method, choices) for choices in each], axis=0)
    return HomeRows(float(np.mean([rank_rows(choices).max() for choices in each])), LaneRows(*sent.tolist()))
