"""Routing that is drawn, and what exchanges and experts take of it on an emulated device; for `hot_experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lending_device import LendingDevice
from torch import Tensor

from schedc.cell.costs import SegmentTimes
from schedc.cell.program import Half
from schedc.ir.arrays import Int64
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.moe.copied import CopiedExperts
from schedc_runtime.moe.counts import Shape, counts_of_experts
from schedc_runtime.moe.hot import Lending
from schedc_runtime.moe.hot_slots import HotLender
from schedc_runtime.moe.router import Router

RANKS, EXPERTS, TOP, TOKENS = 4, 16, 2, 256
WIDTH, INNER, ITEM = 16, 48, 4
"""Columns of a token, columns of an expert, and bytes of a number. An expert has the bytes of 3 * INNER rows."""
SEGMENTS = {"attention": SegmentTimes(20, 20, 18), "shared": SegmentTimes(6, 6, 0), "post": SegmentTimes(2, 2, 0)}
EXPERT = SegmentTimes(20, 20, 26)
"""Milliseconds of the experts of one layer, at the mean number of rows."""
MEAN = TOKENS * TOP
BALANCED = 9.0
"""Milliseconds of a dispatch in which all experts are equally popular."""
PER_ROW = BALANCED / (MEAN * (RANKS - 1) / RANKS)
ROUTING = 1.0
QUEUE = "node"
"""The lane of all exchanges: the ranks are one node."""


def drawn(layer: int, microbatch: int, exponent: float) -> Int64:
    """[ranks, tokens, k] experts of every rank's tokens."""
    popular = np.random.default_rng(layer).permutation(EXPERTS)
    share = np.arange(1, EXPERTS + 1, dtype=np.float64) ** -exponent
    # The k largest of log(share) + Gumbel noise are a draw of k without repetition.
    noise = np.random.default_rng([layer, microbatch]).gumbel(size=(RANKS, TOKENS, EXPERTS))
    return np.asarray(popular[(np.log(share) + noise).argsort(-1)[..., : -TOP - 1 : -1]])


class Drawn(Router):
    """A router whose choices are prescribed for each microbatch; only its gate weights are learned."""

    def draw(self, rank: int, choices: list[Int64]) -> None:
        self.choices = [torch.from_numpy(np.ascontiguousarray(every[rank])) for every in choices]
        self.turn = 0

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, weight, shares = super().forward(tokens)
        self.turn += 1
        return self.choices[(self.turn - 1) % len(self.choices)], weight, shares


@dataclass(frozen=True)
class Traffic:
    """Movement and compute of one layer for one microbatch.

    dispatched: rows that the busiest rank sends or gets in one dispatch. own, borrowed: [ranks] rows that a rank's own
    experts, and its slots, compute. rows: [ranks] rows that a rank sends and gets.
    """

    dispatched: float
    own: Int64
    borrowed: Int64
    rows: Int64

    @classmethod
    def of(cls, choices: Int64, hot: tuple[int, ...]) -> Traffic:
        counts = counts_of_experts(torch.from_numpy(choices), Shape(EXPERTS, 1, RANKS)).rows.long().numpy()
        local = EXPERTS // RANKS
        lending = Lending(hot, RANKS, 0, local)
        borrowed = np.zeros(RANKS, dtype=np.int64)
        for rank in range(RANKS):
            slots = list(lending.lent_to(rank))
            borrowed[rank] = counts[rank, slots].sum()
            counts[rank, slots] = 0
        return cls.between(counts, borrowed)

    @classmethod
    def between(cls, counts: Int64, borrowed: Int64 | int = 0) -> Traffic:
        """counts: [ranks, places] rows that travel by source rank and place, as many places on each rank."""
        between = counts.reshape(RANKS, RANKS, -1).sum(-1)
        out, into = between.sum(1) - between.diagonal(), between.sum(0) - between.diagonal()
        return cls(float(max(out.max(), into.max())), between.sum(0), borrowed + np.zeros(RANKS, np.int64), out + into)


class DrawnTrafficDevice(LendingDevice):
    """A device on which experts take time by their rows, and exchanges by their bytes, as the routing was drawn."""

    rank: int
    traffic: dict[tuple[int, int, int], Traffic]
    """By stage, layer of the stage, microbatch."""
    copies: dict[tuple[int, int, int], float]
    """The same: rows with the bytes of the copies of a microbatch."""

    def time(self, op: MicroStep, half: Half) -> float:
        node = op.stage.shape.nodes[op.node]
        if node.role == "hot":
            return self.copies[op.stage.index, node.layer, op.microbatch] * PER_ROW * self.unit
        if node.role not in ("experts", "dispatch", "combine"):
            return super().time(op, half)
        traffic = self.traffic[op.stage.index, node.layer, op.microbatch]
        if node.exchange:
            return traffic.dispatched * PER_ROW * self.unit
        times = dict(zip((Half.FORWARD, Half.BACKWARD, Half.WEIGHT), EXPERT, strict=True))
        return int(traffic.own[self.rank] + traffic.borrowed[self.rank]) * times[half] / MEAN * self.unit

    def lent_queue(self, lender: Any) -> str:
        return QUEUE

    def lent_seconds(self, lender: Any) -> tuple[float, float]:
        if isinstance(lender, HotLender):
            hot = lender.lending.hot
            return weight_rows(hot) * PER_ROW * self.unit, gradient_rows(hot) * PER_ROW * self.unit
        return (copied_rows(lender.copies) * PER_ROW * self.unit,) * 2


def copied_rows(copies: CopiedExperts) -> float:
    """Rows with the bytes that the busiest rank sends or gets for its copies."""
    sent = [sum(map(len, takers)) for takers in copies.pairs]
    got = [sum(map(len, homes)) for homes in zip(*copies.pairs, strict=True)]
    return 3.0 * INNER * max(*sent, *got)


def weight_rows(hot: tuple[int, ...]) -> float:
    """Rows with the bytes that a rank gets, and hands on, of the weights of ``hot`` experts."""
    return 3.0 * INNER * len(hot)


def gradient_rows(hot: tuple[int, ...]) -> float:
    """Rows with the bytes that the busiest rank sends or gets of the gradients of ``hot`` experts.

    For an expert of another rank it sends all shares; it gets one of each other borrower. An owner also gets the sums.
    """
    owned = [sum(expert // (EXPERTS // RANKS) == rank for expert in hot) for rank in range(RANKS)]
    gets = [own * 2 * (RANKS - 1) / RANKS + (len(hot) - own) * (RANKS - 2) / RANKS for own in owned]
    return 3.0 * INNER * max(*gets, *(float(len(hot) - own) for own in owned))
