"""Bounds of all plans of a space: seconds of a step and bytes of the fullest rank, block by block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int64, repeat
from schedc.ir.placement import Placement
from schedc.ir.plan import Level
from schedc.model.spread import Spread
from schedc.planner.price.layouts import layout_of
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.recomputed import LEVELS
from schedc.planner.price.states import RankLoads, gathered_bytes, held_parameters, kind_parameters, outside_pipeline
from schedc.planner.search.bound_memory import ClaimedPeaks, HeldOfRanks, bytes_of_counts, claimed_peaks
from schedc.planner.search.bound_time import bound_of_counts, bound_of_pairs, bound_of_work
from schedc.planner.search.lanes import chain_seconds, overlapped_lanes, serial_lane
from schedc.planner.search.placed_counts import PlacedCounts, placed_counts
from schedc.planner.space.axes import RankSplit
from schedc.planner.space.blocks import OrderOption, PlanBlock
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem

_ROUNDING = 1e-12
"""Bounds and exact figures sum the same numbers in different orders."""


@dataclass(frozen=True, eq=False)
class BoundedBlock:
    """A block with what no plan of it undercuts.

    step: [prefixes, orders, levels, layouts, methods, zeros] seconds. memory: the same without methods, bytes.
    fits: which legal plans may fit into the device.
    """

    block: PlanBlock
    step: Floats
    memory: Floats
    fits: Bools


@dataclass(frozen=True, eq=False)
class _AlikeOrders:
    """Orders with one placement that are alike for the bound.

    numbers: those among the orders. counts: by the name of a layout. splits: whether weight gradients may come last.
    overlaps: whether exchanges run beside compute.
    """

    numbers: tuple[int, ...]
    counts: dict[str, PlacedCounts]
    splits: bool
    overlaps: bool


def splits_of(space: PlanSpace) -> list[RankSplit]:
    """The rows of the part table that plans of a space need."""
    values = space.values
    splits = (
        prefix.split_by(method, overlap)
        for prefix in space.prefixes()
        for method in (values.methods if prefix.ep > 1 else ("flat",))
        for overlap in values.overlaps
    )
    return sorted(set(splits))


@dataclass(frozen=True, eq=False)
class PlanBounds:
    """Bounds of the plans of a space. table: with all splits of the space."""

    space: PlanSpace
    problem: PlanProblem
    table: PartTable
    _peaks: dict[tuple[str, int, int, int, int], ClaimedPeaks] = field(default_factory=dict, repr=False)

    def blocks(self) -> Iterator[BoundedBlock]:
        """All plans with their bounds."""
        for block in self.space.blocks():
            yield self.of(block)

    def of(self, block: PlanBlock) -> BoundedBlock:
        """The bounds of one block."""
        return _BlockBound(self, block).bounded()

    @cached_property
    def usable(self) -> float:
        """Bytes of a device, with what rounding may take."""
        return self.problem.cluster.device.usable_bytes * (1 + _ROUNDING)

    def peaks_of(self, option: OrderOption, ranks: int, microbatches: int, chunks: int) -> ClaimedPeaks:
        """What the file of a schedule claims of its peaks; nothing at sizes that it does not take."""
        key = (option.choice.name, option.limit, ranks, microbatches, chunks)
        if key not in self._peaks:
            taken = option.limit in option.choice.limits(ranks, microbatches, chunks)
            sizes = option.choice.sizes(ranks, microbatches, chunks, option.limit) if taken else None
            nothing = ClaimedPeaks(np.zeros(ranks, np.int64), 0)
            self._peaks[key] = claimed_peaks(option.choice, sizes, ranks) if sizes else nothing
        return self._peaks[key]

    def groups(self, block: PlanBlock) -> list[_AlikeOrders]:
        """The orders of a block that have legal plans, by placement and by what the bound knows."""
        alike: defaultdict[tuple[bytes, bool, bool], list[int]] = defaultdict(list)
        for number, option in enumerate(block.inner.orders):
            if block.legal[:, number].any() and (placed := self._placed(option, block)) is not None:
                alike[placed, option.choice.splits, option.overlap].append(number)
        return [
            _AlikeOrders(tuple(numbers), self._counts(placed, block), splits, overlaps)
            for (placed, splits, overlaps), numbers in alike.items()
        ]

    def _counts(self, placed: bytes, block: PlanBlock) -> dict[str, PlacedCounts]:
        placement = Placement(np.frombuffer(placed, np.int32)[None, :], (0, 1), block.pp)
        layouts = {name: layout_of(self.problem.model, placement, name) for name in block.inner.layouts}
        return {name: placed_counts(layout, placed, block.pp) for name, layout in layouts.items()}

    def _placed(self, option: OrderOption, block: PlanBlock) -> bytes | None:
        """Where stages lie in an order; None where no prefix of the block takes it."""
        takes = (prefix for prefix in block.prefixes if option in self.space.orders(*prefix.order_key))
        if (taken := next(takes, None)) is None:
            return None
        placement = option.choice.placement(*taken.order_key)
        assert isinstance(placement, Placement)
        return placement.rank_of_stage.tobytes()


class _BlockBound:
    """Bounds of a block, from columns that all of its plans share."""

    def __init__(self, bounds: PlanBounds, block: PlanBlock) -> None:
        self.bounds, self.block, self.inner = bounds, block, block.inner
        self.table, self.problem = bounds.table, bounds.problem
        self.rows = self._rows(False)
        self.many = block.column("microbatches").astype(np.float64)
        model, one_stage = self.problem.model, block.pp * block.vpp == 1
        of_prefixes = [kind_parameters(model, one_stage, prefix.tp) for prefix in block.prefixes]
        self.parameters = np.stack(of_prefixes)[:, None]

    def _rows(self, overlap: bool) -> Int64:
        """[prefixes, methods] rows of the table."""
        methods, index = self.inner.methods, self.table.index
        return np.array([[index[each.split_by(method, overlap)] for method in methods] for each in self.block.prefixes])

    def bounded(self) -> BoundedBlock:
        shape = self.block.legal.shape
        step = np.full(shape, np.inf)
        memory = np.full((*shape[:4], shape[5]), np.inf)
        for group in self.bounds.groups(self.block):
            for layout, name in enumerate(self.inner.layouts):
                counts = group.counts[name]
                whole = self._with_rest(*self._seconds(group, counts))
                bytes = self._bytes(group, counts)
                for row, number in enumerate(group.numbers):
                    step[:, number, :, layout] = whole
                    memory[:, number, :, layout] = bytes[:, row]
        fits = self.block.legal & (memory <= self.bounds.usable)[:, :, :, :, None, :]
        return BoundedBlock(self.block, step * (1 - _ROUNDING), memory, fits)

    def _seconds(self, group: _AlikeOrders, counts: PlacedCounts) -> tuple[Floats, RankLoads]:
        """Seconds of the pipeline [prefixes, levels, methods], and loads of ranks that fit beside them."""
        rows = (self._rows(True) if group.overlaps else self.rows).ravel()
        asked = (self.inner.levels, repeat(self.many, self.rows.shape[1]), self.table.p2p[rows], group.splits)
        own = (self.table, rows, group.splits)
        if self.problem.stack.free_steps:
            lanes = overlapped_lanes(*own) if group.overlaps else [serial_lane(*own)]
            seconds = bound_of_work(counts, lanes, *asked[:2])
        elif group.overlaps:
            seconds = bound_of_pairs(counts, overlapped_lanes(*own), chain_seconds(*own), *asked)
        else:
            seconds = bound_of_counts(counts, serial_lane(*own), *asked)
        of_ranks = counts.on_rank @ counts.of_stage
        loads = self.table.loads(rows, of_ranks, self.parameters, counts.of_stage.shape[0])
        shape, beside = self.rows.shape, (self.rows.shape[0], 1, self.rows.shape[1], 1)
        per_row = loads._replace(
            own=loads.own.reshape(-1, 1, 1, 1),
            experts=loads.experts.reshape(-1, 1, 1, 1),
            late=loads.late.reshape(2, *beside),
            busy=loads.busy.reshape(2, *beside),
        )
        return seconds.reshape(*shape, len(self.inner.levels)).transpose(0, 2, 1), per_row

    def _with_rest(self, seconds: Floats, loads: RankLoads) -> Floats:
        """[prefixes, levels, methods, zeros] seconds of a step."""
        pipeline, many = seconds[..., None], self.many[:, None, None, None]
        machine = self.table.machine.of_runs(self.rows[:, :1, None])
        beside = outside_pipeline(machine, self._spread(3), loads, many, pipeline)
        return beside.step_of(pipeline)

    def _spread(self, axes: int) -> Spread[Floats]:
        """The spread of prefixes, with ``axes`` further ones behind; the last one is that of the levels of sharding."""
        shape = (-1, *(1 for _ in range(axes)))
        names = (each.name for each in fields(Spread) if each.name != "zero")
        ranks = {name: self.block.column(name).astype(np.float64).reshape(shape) for name in names}
        return Spread(**ranks, zero=np.array(self.inner.zeros, np.float64))

    def _bytes(self, group: _AlikeOrders, counts: PlacedCounts) -> Floats:
        """[prefixes, orders of the group, levels, zeros] bytes of the fullest rank."""
        held = self.table.held[self.rows].min(axis=1)
        pending = self.table.pending[self.rows].min(axis=1)
        parameters = held_parameters(self.parameters, self._spread(1))
        parameters = np.broadcast_to(parameters, (len(self.many), len(self.inner.zeros), parameters.shape[-1]))
        numbers = [LEVELS.index(Level(level)) for level, _ in self.inner.levels]
        reserve = self.table.reserve[self.rows].min(axis=1)[:, numbers, int(group.overlaps)]
        peaks = [
            [self.bounds.peaks_of(self.inner.orders[number], *prefix.order_key) for prefix in self.block.prefixes]
            for number in group.numbers
        ]
        of_ranks = HeldOfRanks.of(counts, held, pending, self.inner.levels, group.splits)
        bytes = bytes_of_counts(counts, parameters, of_ranks, peaks)
        gathered = gathered_bytes(self.parameters, self._spread(1))
        return np.asarray(bytes + reserve[:, None, :, None] + gathered[:, None, None, :])
