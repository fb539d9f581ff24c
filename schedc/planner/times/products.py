"""Matrix products of many runs: how well tiles fill the device, and how long each takes under many constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from schedc.ir.arrays import Floats
from schedc.model.parts import PartName, WeightProduct
from schedc.planner.space.axes import PlanAxes
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.table import RunTable

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.85))
"""Rows and columns that one block computes, and its speed beside the largest."""

_FLOP_PER_BYTE = 153.0
"""FLOP in the time of a byte of memory on an A100, where ``gemm_k0`` is counted.

A block of results reads its first operands, and writes what it made, while it multiplies nothing. That takes the time
of memory: the columns that could be summed meanwhile grow with FLOP per byte of the device, and with fewer bits.
"""


@dataclass(frozen=True, eq=False)
class LayerProduct:
    """One product of many runs: m x k times k x n, as it runs forward, ``count`` times; [runs, 1] each.

    m: [runs, K] for products of experts whose loads are drawn.

    grouped: whether all its repetitions run as one kernel, each with other weights. wide: whether it stays in 16 bits.
    """

    m: Floats
    n: Floats
    k: Floats
    count: Floats
    grouped: bool = False
    wide: bool = False


@dataclass(frozen=True, eq=False)
class ProductWork:
    """What a product takes in one direction, whatever the constants; [runs, 1] each, or [runs, K] by drawn loads.

    grouped: as in `LayerProduct`. flops, bytes: sums over its repetitions. fill: the share of the device that computes.
    summed: columns that are summed; infinite where a start of sums takes no time. rows: rows of a repetition, forward.
    peak: FLOP/s. bits: 0 for products in 16 bits, 1 in 8, 2 in 4. blocks: whether 8 bits have a scale per block. cast:
    bytes that move when operands are converted to few bits. hbm: bytes per second.
    """

    grouped: bool
    flops: Floats
    bytes: Floats
    fill: Floats
    summed: Floats
    rows: Floats
    peak: Floats
    bits: Floats
    blocks: Floats
    cast: Floats
    hbm: Floats

    def seconds(self, constants: ConstantVectors) -> Floats:
        """[runs, K] the longer of compute and memory, behind the conversion of what is multiplied.

        No product is faster than the peak, whatever the constants.
        """
        blocks = np.where(self.blocks, constants["blocks"], 1.0)
        if self.grouped:
            best = constants["grouped"] * self.rows / (self.rows + constants["grouped_r0"]) * blocks
        else:
            wide = np.where(
                self.bits == 0, constants["gemm"], np.where(self.bits == 1, constants["fp8"] * blocks, constants["fp4"])
            )
            best = wide * self.fill
        start = constants["gemm_k0"] * (self.peak / self.hbm / _FLOP_PER_BYTE)
        compute = self.flops * (1.0 + start / self.summed) / (self.peak * np.minimum(best, 1.0))
        memory = self.hbm * constants["hbm"]
        return np.asarray(np.maximum(compute, self.bytes / memory) + self.cast / memory)


def fill_of(m: Floats, n: Floats, sms: Floats) -> Floats:
    """[runs, ...] share of the device that computes, for the best tile: results over those of whole waves of blocks."""
    best = np.full(np.broadcast_shapes(m.shape, n.shape), 1e-3)
    for high, wide, speed in _TILES:
        waves = np.maximum(1.0, np.ceil(np.ceil(m / high) * np.ceil(n / wide) / sms))
        best = np.maximum(best, speed * m * n / (waves * sms * high * wide))
    return best


def part_products(runs: RunTable, name: PartName, spread: Floats | None = None) -> Iterator[LayerProduct]:
    """The products of a part on a rank. A run whose model has fewer products counts 0 of the others.

    spread: [1, K] of the loads of experts; None for those of the runs.
    """
    parts = runs.part(name)
    longest = max(parts, key=lambda part: len(part.products))
    tokens, tp = runs.tokens[:, None], runs.tp[:, None]
    rows = sent_rows(runs, spread) if longest.rows == "sent" else tokens if longest.rows == "token" else tokens / tp
    sharded = longest.shards == "ep"
    for product, each in zip(longest.products, zip_longest(*(part.products for part in parts)), strict=True):
        of_runs = np.array([_on_rank(own, run.axes, sharded) for own, run in zip(each, runs.each, strict=True)])
        n, k, count = of_runs.T[..., None]
        own_rows = rows / np.maximum(count, 1.0) if sharded else rows
        yield LayerProduct(own_rows, n, k, count, grouped=sharded, wide=product.wide)


def _on_rank(product: WeightProduct | None, axes: PlanAxes, sharded: bool) -> tuple[float, float, float]:
    """Columns, summed columns and matrices of a product on a rank. sharded: whether expert ranks share its matrices."""
    if product is None:
        return 0.0, 0.0, 0.0
    return product.n.on_rank(axes.tp), product.k.on_rank(axes.tp), product.copies / axes.ep if sharded else 1.0


def sent_rows(runs: RunTable, spread: Floats | None = None) -> Floats:
    """[runs, 1] rows that go to the experts of the fullest rank, for one microbatch and layer.

    spread: [1, K] of the loads of experts, and then [runs, K]; None for those of the runs.
    """
    return (runs.tokens / runs.tp * runs.expert(lambda moe: moe.top))[:, None] * runs.skew(spread)


def directions(runs: RunTable, product: LayerProduct) -> tuple[ProductWork, ProductWork, ProductWork]:
    """The work of F, I and W. W reads and writes gradients of 4 bytes.

    W of experts sums over rows, and few rows are slow already by ``grouped_r0``: they count once.
    """
    m, n, k = product.m, product.n, product.k
    none = np.zeros_like(n)
    forward, input = _work(runs, product, (m, n, k), none, m * k), _work(runs, product, (m, k, n), none, m * n)
    weight = _work(runs, product, (n, k, m), 8.0 * n * k, none)
    return forward, input, replace(weight, summed=np.full_like(weight.summed, np.inf)) if product.grouped else weight


def _work(runs: RunTable, product: LayerProduct, sizes: Sequence[Floats], more: Floats, cast: Floats) -> ProductWork:
    """more: [runs, 1] bytes on top of operands and result. cast: [runs, 1] numbers that are converted from 16 bits."""
    count = np.maximum(product.count, 0.0)
    there = (count > 0) & (sizes[0] > 0) & (sizes[1] > 0) & (sizes[2] > 0)
    count = np.where(there, count, 0.0)
    m, n, k = (np.where(there, size, 1.0) for size in sizes)
    operand = 2.0 if product.wide else runs.operand_bytes[:, None]
    columns = (
        2.0 * m * n * k * count,
        count * (operand * (m * k + n * k) + 2.0 * m * n + more),
        fill_of(m, n, runs.sms[:, None]),
        k,
        np.maximum(product.m, 1.0),
        (runs.wide_peak if product.wide else runs.peak)[:, None],
        np.zeros_like(k) if product.wide else runs.bits[:, None],
        np.zeros_like(k) if product.wide else runs.block_scales[:, None],
        count * cast * (0.0 if product.wide else runs.cast_bytes[:, None]),
        runs.hbm[:, None],
    )
    return ProductWork(product.grouped, *columns)
