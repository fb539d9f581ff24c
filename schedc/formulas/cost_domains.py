"""The spaces of costs that formulas of times cover: all costs, F = I = W, and costs with a small latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from schedc.exact.cone import Vector
from schedc.exact.space import Bound, Space
from schedc.ir.arrays import Int64
from schedc.ir.ops import OpKind
from schedc.step.dependencies import Dependencies

LATENCY_SHARE = 10
"""In the space with latency, p2p is at most every other cost divided by this."""

_TYPICAL = {"F": 100, "I": 100, "W": 80, "B": 180, "R": 90, "FB": 260, "p2p": 1}

_SPREAD = 2.5
"""Spread of the random weights of a cone's rays, as a power of e. Uneven weights give vectors near the borders."""

_WHOLE = 1 << 20


def spaces_of(sizes: Sequence[Dependencies]) -> tuple[Space, ...]:
    """The spaces for the cells of some sizes: without latency, F = I = W, both of them with a small latency.

    F = I = W is left out where no backward is split. All spaces have the symbols that the cells of any size need.
    """
    named = {symbol for cells in sizes for symbol in Space.of(cells).symbols}
    split = any(bool((cells.schedule.kind == OpKind.I).any()) for cells in sizes)
    named -= {"B"} if split else set()
    plain = Space(tuple(s for s in _TYPICAL if s in named), split)
    equal = replace(plain, symbols=tuple(s for s in plain.symbols if s not in ("I", "W")), equal=True)
    return (plain, equal, _with_latency(plain), _with_latency(equal)) if split else (plain, _with_latency(plain))


def _with_latency(space: Space) -> Space:
    late = replace(space, symbols=(*space.symbols, "p2p"))
    return replace(late, narrowed=tuple(_small(late, symbol) for symbol in space.symbols if symbol != "FB"))


def _small(space: Space, cost: str) -> Bound:
    """The bound that keeps the latency small beside a cost."""
    form = tuple(a - LATENCY_SHARE * b for a, b in zip(space.form(cost), space.form("p2p"), strict=True))
    return Bound(form, False, f"{LATENCY_SHARE}*p2p <= {cost}")


def typical(space: Space) -> Int64:
    """[symbols] typical costs: F = I, W a little less, a pair a little less than its two halves."""
    return np.array([_TYPICAL[symbol] for symbol in space.symbols], np.int64)


def random_vectors(space: Space, count: int, seed: int) -> list[Vector]:
    """[count] vectors inside a space's cone: sums of its rays with random weights."""
    rng = np.random.default_rng(seed)
    rays = space.cone.rays
    weights = np.exp(_SPREAD * rng.standard_normal((count, len(rays))))
    counts = np.ceil(_WHOLE * weights / weights.max(axis=1, keepdims=True)).astype(np.int64).tolist()
    return [
        tuple(sum(n * ray[i] for n, ray in zip(row, rays, strict=True)) for i in range(space.dimension))
        for row in counts
    ]
