"""Many cost vectors as columns: the input of batched timelines, in place of a list of `Costs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats
from schedc.step.costs.costs import Costs, OpCosts
from schedc.step.costs.keys import BY_NAME, CELL_KEYS, with_keys


@dataclass(frozen=True, eq=False)
@with_keys(default=lambda _: None, among=CELL_KEYS)
class CostBatch:
    """K cost vectors: every time is [K], the same for all stages, or [K, stages]; p2p is [K].

    B defaults to I + W, R to F and FB to F + B, as in `Costs`. FB does so for a NaN, too. p2p defaults to 0.
    Recomputation inside of backwards, `Costs.recompute_in_backward`, is not among them.
    """

    F: Floats
    I: Floats  # noqa: E741
    W: Floats
    B: Floats | None = None
    FB: Floats | None = None
    p2p: Floats | None = None
    R: Floats | None = None

    def __len__(self) -> int:
        return len(self.F)

    @classmethod
    def of(cls, costs: Sequence[Costs], stages: int) -> CostBatch:
        """The vectors of many `Costs`; raises `DiagnosticError` (S404) for a list of another length than ``stages``."""
        if any(np.any(c.recompute_in_backward) for c in costs):
            raise CompilerBug("costs", "a batch does not know `recompute_in_backward`")
        if any(c.microbatches for c in costs):
            raise CompilerBug("costs", "a batch does not know `microbatches`")
        lists = {name: list(map(attrgetter(name), costs)) for name in CELL_KEYS}
        if any(tuple in map(type, given) for given in lists.values()):
            resolved = [c.resolved(stages) for c in costs]
            lists = {name: list(map(attrgetter(name), resolved)) for name in CELL_KEYS}
        columns: dict[str, Any] = {}
        for name, given in lists.items():
            key = BY_NAME[name]
            if key.enters == "pair":
                missing = np.full(columns["F"].shape, np.nan)
                columns[name] = None if all(one is None for one in given) else _filled(given, missing)
            else:
                columns[name] = _filled(given, key.summed(columns) if key.sums else given)
        return cls(**columns, p2p=np.array([c.p2p for c in costs], np.float64))

    def rows(self, stages: int) -> OpCosts:
        """The vectors with one row per stage, or a single one where all stages cost the same."""
        columns = {name: getattr(self, name) for name in CELL_KEYS}
        shapes = {np.shape(cost) for cost in columns.values() if cost is not None}
        K = len(self)
        if not shapes <= {(K,), (K, stages)} or (self.p2p is not None and np.shape(self.p2p) != (K,)):
            raise CompilerBug("costs", f"a batch of {K} for {stages} stages with shapes {sorted(shapes)}")
        rows = stages if (K, stages) in shapes else 1

        def lanes(cost: Floats) -> Floats:
            by_row = np.asarray(cost, np.float64).reshape(K, -1).T
            return np.ascontiguousarray(np.broadcast_to(by_row, (rows, K)))

        for name, cost in columns.items():
            key = BY_NAME[name]
            if cost is not None:
                columns[name] = lanes(cost)
            elif key.enters != "pair":
                columns[name] = key.summed(columns) if key.sums else np.broadcast_to(key.default or 0.0, (rows, K))
        p2p = np.zeros(K) if self.p2p is None else np.ascontiguousarray(self.p2p, np.float64)
        return OpCosts(**columns, p2p=p2p)


def _filled(given: Sequence[Any], missing: Any) -> Floats:
    """[K] or [K, stages] the given values, and those of ``missing`` for vectors without one."""
    if type(None) in map(type, given):
        given = [other if one is None else one for one, other in zip(given, missing, strict=True)]
    return np.array(given, np.float64)
