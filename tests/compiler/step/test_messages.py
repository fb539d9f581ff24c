"""Many costs through one order whose messages leave inside cells: each gives what it gives alone, bit for bit."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from schedc.diagnostics import CompilerBug
from schedc.elaborate import elaborate
from schedc.ir.arrays import Floats, Int64
from schedc.ir.placement import linear
from schedc.load.library import open_schedule
from schedc.step import messages, walk
from schedc.step import numba_kernels as compiled
from schedc.step.dependencies import Dependencies
from schedc.step.lowering import lower
from schedc.step.messages import message_makespans, simulate_messages
from support import orders
from support.random_schedules import random_schedule

STUCK = ["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"]
LOOPS = compiled.load() or (lambda loop: loop)


def random_costs(seed: int, cells: int, K: int) -> tuple[Int64, Floats, Floats]:
    """Kinds of cells, some of which do not depend on one of their messages, with K delays and latencies."""
    rng = np.random.default_rng(seed)
    kinds = int(rng.integers(1, 5))
    delay = rng.uniform(0, 3, (kinds, 3, 3, K))
    delay[rng.random((kinds, 3, 3)) < 0.2, :] = -np.inf
    delay[:, :, 0] = np.maximum(delay[:, :, 0], 0)
    return rng.integers(0, kinds, cells), delay, rng.uniform(0, 1, K) * (seed % 3 > 0)


def in_each_way(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> list[Floats]:
    makespans = []
    for loops in (None, LOOPS):
        monkeypatch.setattr(walk, "kernels", lambda _seconds, loops=loops: loops)
        makespans.append(message_makespans(*arguments))  # type: ignore[arg-type]
    return makespans


@pytest.mark.parametrize("seed", range(20))
def test_many_costs_give_what_each_gives_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Dependencies.of(random_schedule(seed))
    K = 300 if seed % 5 == 0 else 3  # more than run at a time
    kind, delay, latency = random_costs(seed, len(cells), K)
    numpy_way, compiled_way = in_each_way(monkeypatch, cells, kind, delay, latency)
    for k in range(0, K, 1 + K // 7):
        alone = simulate_messages(cells, kind, np.zeros(len(delay)), delay[..., k], latency[k]).timeline
        assert numpy_way[k] == alone.makespan
    assert numpy_way.tobytes() == compiled_way.tobytes()


def test_numpy_takes_many_costs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Dependencies.of(elaborate(open_schedule("dualpipev"), {"P": 2, "M": 6}))
    kind, delay, latency = random_costs(4, len(cells), 10)
    whole, _ = in_each_way(monkeypatch, cells, kind, delay, latency)
    monkeypatch.setattr(walk, "_LEAST_WIDTH", 3)
    monkeypatch.setattr(walk, "_IN_CACHE", 1)
    parts, _ = in_each_way(monkeypatch, cells, kind, delay, latency)
    assert whole.tolist() == parts.tolist()


def test_a_deadlock_is_our_fault() -> None:
    cells = Dependencies.of(orders.schedule(STUCK, linear(3, 2)))
    with pytest.raises(CompilerBug, match="a deadlock"):
        message_makespans(cells, np.zeros(len(cells), np.int64), np.ones((1, 3, 3, 1)), np.zeros(1))


def test_what_is_kept_of_an_order_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions are found once, and do not hold the order that they belong to."""
    gc.freeze()  # collections below look at new objects alone
    calls = SimpleNamespace(count=0)

    def counted(*arguments: object, **more: object) -> object:
        calls.count += 1
        return lower(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(messages, "lower", counted)
    cells = Dependencies.of(random_schedule(3))
    for _ in range(3):
        message_makespans(cells, *random_costs(3, len(cells), 2))
    assert calls.count == 1
    gone = weakref.ref(cells)
    del cells
    gc.collect()
    assert gone() is None
