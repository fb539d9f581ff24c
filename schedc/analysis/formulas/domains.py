"""Which costs a formula speaks of: the symbols that are free, how other costs follow, and random vectors of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.cost.batch import CostBatch
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import has_recomputation
from schedc.ir.schedule import Int64

_UNIT = 1 << 16
"""Typical size of a random cost: so large that adding 1 to it changes no order of two different sums."""

_SPREADS = (0.05, 0.4, 1.6)
"""How far costs differ from each other, as powers of e: nearly equal ones find regimes that are narrow."""

_TYPICAL = {"F": 100, "I": 100, "W": 80, "B": 180, "R": 90, "FB": 260, "p2p": 1}

LATENCY_SHARE = 10
"""In the domain with latency, p2p is at most every other cost divided by this."""


@dataclass(frozen=True)
class Domain:
    """Costs that are free, with the conditions under which they are drawn.

    symbols: the free costs, of F, I, W, B, R, FB, p2p. equal: whether F, I and W are one value, called F.
    conditions: what every vector of the domain satisfies, as it is printed.
    """

    symbols: tuple[str, ...]
    equal: bool = False
    conditions: tuple[str, ...] = ()

    @property
    def latency(self) -> bool:
        return "p2p" in self.symbols

    @property
    def typical(self) -> Int64:
        """[1, symbols] costs as they often are: F = I, W a little less, a pair a little less than its two halves."""
        return np.array([[_TYPICAL[symbol] for symbol in self.symbols]], np.int64)

    def vectors(self, rng: np.random.Generator, count: int, unit: int = _UNIT) -> Int64:
        """[count, symbols] random integers; a small ``unit`` makes ties likely, a large one rules them out."""
        basic = [s for s in self.symbols if s in ("F", "I", "W", "B", "R")]
        spread = rng.choice(_SPREADS, (count, 1))
        drawn = (
            np.ceil(unit * np.exp(rng.uniform(-spread, spread, (count, len(basic))))).astype(np.int64) * LATENCY_SHARE
        )
        values = dict(zip(basic, drawn.T, strict=True))
        if "FB" in self.symbols:
            F, B = values["F"], self._backward(values)
            values["FB"] = np.maximum(F, B) + (np.minimum(F, B) * rng.uniform(0, 1, count)).astype(np.int64)
        if self.latency:
            share = rng.uniform(0, 1, count) ** 2 / LATENCY_SHARE
            values["p2p"] = (drawn.min(axis=1) * share).astype(np.int64)
        return np.stack([values[s] for s in self.symbols], axis=1)

    def _backward(self, values: dict[str, Int64]) -> Int64:
        if "B" in values:
            return values["B"]
        return 2 * values["F"] if self.equal else values["I"] + values["W"]

    def costs(self, vectors: Int64) -> CostBatch:
        """The costs that each vector means; B = I + W where the backward is split."""
        values = dict(zip(self.symbols, np.asarray(vectors.T, np.float64), strict=True))
        if self.equal:
            values = {**values, "I": values["F"], "W": values["F"]}
        if "B" in values:
            values = {**values, "I": values["B"], "W": np.zeros_like(values["B"])}
        return CostBatch(**values)


def domains_of(sizes: Sequence[Dependencies]) -> tuple[Domain, ...]:
    """Without latency; with F = I = W and without latency, where the backward is split; with a small latency."""
    split = any(bool((cells.schedule.kind == OpKind.I).any()) for cells in sizes)
    pairs = any(bool(cells.pairs.any()) for cells in sizes)
    again = ("R",) if any(has_recomputation(cells.schedule) for cells in sizes) else ()
    whole = (*(("F", "I", "W") if split else ("F", "B")), *again)
    pair = ("FB",) if pairs else ()
    backward = "I + W" if split else "B"
    within = (f"F <= FB, {backward} <= FB, FB <= F + {backward}",) if pairs else ()
    least = tuple(f"{LATENCY_SHARE}*p2p <= {s}" for s in whole)
    domains = [Domain((*whole, *pair), conditions=within)]
    if split:
        equal = ("2*F <= FB, FB <= 3*F",) if pairs else ()
        domains.append(Domain(("F", *again, *pair), equal=True, conditions=("F == I, I == W", *equal)))
    return (*domains, Domain((*whole, *pair, "p2p"), conditions=(*within, *least)))
