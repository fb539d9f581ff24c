"""What a schedule takes at one size: times as exact linear forms in the costs, and counts of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schedc.analysis.batch import Outcomes, simulate_batch
from schedc.analysis.dependencies import Bools, Dependencies
from schedc.analysis.formulas.domains import Domain
from schedc.analysis.memory import measure_memory
from schedc.ir.schedule import Int64

Floats = npt.NDArray[np.float64]

TIMES = ("bubble", "span_bubble")
_PEAKS = ("peak_activations", "peak_activations_between", "peak_pending_weight")
COUNTS = (*_PEAKS, "messages_sent")
TOTALS = ("messages", "busiest_link")


@dataclass(frozen=True, eq=False)
class Forms:
    """One time, largest over the ranks, under K cost vectors.

    values: [K]. forms: [K, symbols] how often each cost counts on the critical path (for a bubble: less what the
    rank computes), so that value = form . vector. exact: [K] whether that equation was found to hold; it fails where
    two critical paths of different forms are equally long. even: [K] whether all ranks have the same value.
    """

    values: Floats
    forms: Floats
    exact: Bools
    even: Bools


def linear_forms(cells: Dependencies, domain: Domain, vectors: Int64) -> dict[str, Forms]:
    """The times of `TIMES` at one size, by name.

    A time is a maximum (or a difference of maxima) of sums over paths, so around a generic cost vector it is one
    linear form with integer coefficients: the counts on the critical path. They are read off as the change when one
    cost grows by 1, exact because all costs are integers that doubles hold; form . vector = value confirms them.
    """
    count, symbols = vectors.shape
    steps = np.concatenate([np.zeros((1, symbols), np.int64), np.eye(symbols, dtype=np.int64)])
    outcomes = simulate_batch(cells, domain.costs((vectors[:, None] + steps).reshape(-1, symbols)))
    return {name: _forms(_by_rank(outcomes, name).reshape(-1, count, symbols + 1), vectors) for name in TIMES}


def _forms(values: Floats, vectors: Int64) -> Forms:
    largest = values.max(axis=0)
    base, forms = largest[:, 0], largest[:, 1:] - largest[:, :1]
    even = (values == largest).all(axis=(0, 2))
    return Forms(base, forms, (forms * vectors).sum(axis=1) == base, even)


def times(cells: Dependencies, domain: Domain, vectors: Int64) -> dict[str, tuple[Floats, Bools]]:
    """[K] the times of `TIMES`, largest over the ranks, and whether they are the same on all, at one size."""
    outcomes = simulate_batch(cells, domain.costs(vectors))
    by_rank = {name: _by_rank(outcomes, name) for name in TIMES}
    return {name: (v.max(axis=0), (v == v.max(axis=0)).all(axis=0)) for name, v in by_rank.items()}


def _by_rank(outcomes: Outcomes, name: str) -> Floats:
    """[P, K]"""
    return np.asarray(getattr(outcomes, name), np.float64)


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
