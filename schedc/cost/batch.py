"""Many cost vectors as columns: the input of batched timelines, in place of a list of `Costs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedc.cost.costs import Costs
from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats


@dataclass(frozen=True, eq=False)
class CostBatch:
    """K cost vectors: every time is [K], the same for all stages, or [K, stages]; p2p is [K].

    B defaults to I + W, R to F and FB to F + B, as in `Costs`, FB also where it is not a number; p2p defaults to 0.
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
        p2p = np.array([c.p2p for c in costs], np.float64)
        if all(not isinstance(cost, tuple) for c in costs for cost in (c.F, c.I, c.W, c.B, c.R, c.FB)):
            F, I, W = (np.array([getattr(c, name) for c in costs], np.float64) for name in ("F", "I", "W"))  # noqa: E741
            B = np.array([c.I + c.W if c.B is None else c.B for c in costs], np.float64)  # type: ignore[operator]
            R = np.array([c.F if c.R is None else c.R for c in costs], np.float64)
            given = any(c.FB is not None for c in costs)
            return cls(F, I, W, B, np.array([c.FB for c in costs], np.float64) if given else None, p2p, R)
        resolved = [c.resolved(stages) for c in costs]
        F, I, W, B, R = (np.stack([getattr(c, name) for c in resolved]) for name in "FIWBR")  # noqa: E741
        return cls(F, I, W, B, _either([c.FB for c in resolved], np.full(F.shape, np.nan)), p2p, R)

    def rows(self, stages: int) -> CostRows:
        """The vectors with one row per stage, or a single one where all stages cost the same."""
        given = [cost for cost in (self.F, self.I, self.W, self.B, self.R, self.FB) if cost is not None]
        shapes = {np.shape(cost) for cost in given}
        K = len(self)
        if not shapes <= {(K,), (K, stages)} or (self.p2p is not None and np.shape(self.p2p) != (K,)):
            raise CompilerBug("costs", f"a batch of {K} for {stages} stages with shapes {sorted(shapes)}")
        rows = stages if (K, stages) in shapes else 1

        def lanes(cost: Floats) -> Floats:
            by_row = np.asarray(cost, np.float64).reshape(K, -1).T
            return np.ascontiguousarray(np.broadcast_to(by_row, (rows, K)))

        F, I, W = lanes(self.F), lanes(self.I), lanes(self.W)  # noqa: E741
        B = I + W if self.B is None else lanes(self.B)
        R = F if self.R is None else lanes(self.R)
        p2p = np.zeros(K) if self.p2p is None else np.ascontiguousarray(self.p2p, np.float64)
        return CostRows(F, I, W, B, R, None if self.FB is None else lanes(self.FB), p2p)


@dataclass(frozen=True, eq=False)
class CostRows:
    """`CostBatch` laid out for one schedule: F, I, W, B, R, FB are [rows, K], rows being 1 or the number of stages.

    FB is None, or not a number for a vector, where a pair takes F + B of its two stages.
    """

    F: Floats
    I: Floats  # noqa: E741
    W: Floats
    B: Floats
    R: Floats
    FB: Floats | None
    p2p: Floats

    def pair(self, forward: Any, backward: Any, full: Any) -> Floats:
        """[pairs, K] times of overlapped pairs by the rows of their two stages; see `StageCosts.pair`."""
        F, B = self.F[forward], np.where(full[:, None], self.B[backward], self.I[backward])
        if self.FB is None:
            return np.asarray(F + B)
        whole = self.FB[forward]
        less = np.where(full[:, None], whole, np.maximum(whole - self.W[backward], np.maximum(F, B)))
        return np.asarray(np.where(np.isnan(whole), F + B, less))


def _either(given: Sequence[Floats | None], missing: Floats) -> Floats | None:
    """[K, stages] the given rows, and ``missing`` for vectors without one; None if no vector has one."""
    if all(one is None for one in given):
        return None
    return np.stack([other if one is None else one for one, other in zip(given, missing, strict=True)])
