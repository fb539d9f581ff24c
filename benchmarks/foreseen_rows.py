"""Rows that `waterfall.py` predicts with: drawn at the stated skew, by other random numbers than those of its steps.

Two steps are drawn for each layer. Experts are lent and copied by the rows of the first one; the second is the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from drawn_routing import EXPERTS, LOCAL, PER_NODE, RANKS, LaneRows, computing_ranks, drawn, expert_rows, sent_rows

from schedc.cell.recorded_rows import RecordedRows
from schedc.ir.arrays import Floats, Int32, Int64, bincount
from schedc.step.costs.forest import NUMPY, rows_on_ranks
from schedc.step.costs.step_copies import QuotaTables, divided, plan_step_among, quotas_of

_FAR = 1 << 20
"""The first turn of these draws: no step that is measured comes so far."""
SLOTS = 3
"""Copies that a rank holds in a step at most, as `balance by step` has them."""
Lent = Callable[[Int64], tuple[int, ...]]
"""The experts that all ranks have in a step, by the rows [ranks, experts] of the step before."""


class ForeseenRows(NamedTuple):
    """Rows of a step. factors: [layers, microbatches, ranks] rows that ranks compute, over their mean.

    sent: rows of a dispatch per token, for the rank that sends or gets most, in the mean. recorded: by expert, without
    copies.
    """

    factors: Floats
    sent: LaneRows
    recorded: RecordedRows


def foreseen(
    method: str, rho: float, layers: int, microbatches: int, tokens: int, lent: Lent | None = None, even: bool = False
) -> ForeseenRows:
    """The rows of ``layers`` at this skew. tokens: of a rank. lent: with hot experts. even: with copies for a step."""
    rows = _recorded(rho, layers, microbatches, tokens)
    factors, sent = np.zeros((layers, microbatches, RANKS)), list[LaneRows]()
    for layer in range(layers):
        before = rows[0, layer].astype(np.int64)
        hot = lent(before.sum(0)) if lent else ()
        held = _copies(before) if even else ((),) * RANKS
        for number in range(microbatches):
            choices = drawn(layer, _FAR + microbatches + number, rho, tokens)
            ranks = _beside_copies(choices, held) if any(held) else computing_ranks(choices, hot)
            counts = bincount(ranks.ravel(), minlength=RANKS)
            factors[layer, number] = counts / counts.mean()
            sent.append(sent_rows(method, choices, ranks, any(held)))
    mean = LaneRows(*np.mean(sent, axis=0).tolist())
    return ForeseenRows(factors, mean, RecordedRows.of_experts("foreseen", rows))


@lru_cache(maxsize=4)
def _recorded(rho: float, layers: int, microbatches: int, tokens: int) -> Int32:
    """[2, layers, microbatches, ranks, experts] rows of both steps."""
    turns = np.arange(2 * microbatches).reshape(2, microbatches) + _FAR
    return np.array([
        [[expert_rows(drawn(layer, turn, rho, tokens)) for turn in step] for layer in range(layers)]
        for step in turns.tolist()
    ], np.int32)  # fmt: skip


def _copies(before: Int64) -> tuple[tuple[int, ...], ...]:
    """[ranks] the copies of a step. before: [microbatches, ranks, experts] rows of the step before."""
    homes = before.sum(1)
    squares = np.square(homes.reshape(len(homes), RANKS, LOCAL).sum(2)).sum(0)
    return plan_step_among(homes.sum(0).tolist(), squares.tolist(), len(homes), SLOTS, PER_NODE)


def _beside_copies(choices: Int64, held: tuple[tuple[int, ...], ...]) -> Int64:
    """[ranks, tokens, TOP] the rank that computes each choice: rows of an expert go to ranks in ascending order."""
    parent, below, borrowed, peers = quotas_of(held, LOCAL, PER_NODE)
    quotas = QuotaTables(np.array(parent), np.array(below), np.array(borrowed), peers)
    rows = expert_rows(choices).sum(0).reshape(RANKS, LOCAL)
    ends = rows_on_ranks(NUMPY, rows, divided(NUMPY, rows, quotas)).reshape(RANKS, EXPERTS).cumsum(0)
    computing = np.zeros(choices.size, np.int64)
    for expert in range(EXPERTS):
        own = np.flatnonzero(choices.ravel() == expert)
        computing[own] = np.searchsorted(ends[:, expert], np.arange(own.size), side="right")
    return computing.reshape(choices.shape)
