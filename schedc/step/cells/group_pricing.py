"""Prices a schedule on all ranks of an expert group in step, where these have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedc.cell.costs import OF_ROWS, CellCosts
from schedc.cell.graph import EXCHANGE_LANES, StageShape
from schedc.cell.group import GroupTasks, play_group, play_ranks, task_times
from schedc.cell.issue_order import ExpertRanks
from schedc.cell.program import CellProgram
from schedc.cell.serial import serial
from schedc.cell.simulate import Played
from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats, Int64
from schedc.step.dependencies import Dependencies
from schedc.step.lane_walk import LaneWalk
from schedc.step.timeline import Timeline, timeline_of


def layers_of(shape: StageShape) -> int:
    """Number of layers with experts of a stage."""
    return 1 + max((node.layer for node in shape.nodes if node.role in OF_ROWS), default=-1)


@dataclass(frozen=True, eq=False)
class RankRows:
    """The ranks of an expert group.

    factors: [layers or 1, microbatches or 1, ranks] rows over the rows that the costs are for (`schedc.cell.rows`).
    ranks: who exchanges with whom; None: all with all.
    shapes: [stages] graphs of the stages, whose layers with experts are those of the factors, in this order.
    """

    factors: Floats
    shapes: Sequence[StageShape]
    ranks: ExpertRanks | None = None

    @cached_property
    def layers(self) -> tuple[Int64, Int64]:
        """[stages] the first layer with experts of each stage among those of all stages, and their number."""
        count = np.array([layers_of(shape) for shape in self.shapes], np.int64)
        return np.cumsum(count) - count, count

    @property
    def least(self) -> float:
        """The largest factor that some rank has in all layers and microbatches at least."""
        return float(self.factors.min(axis=(0, 1)).max())


class KindOfCell(NamedTuple):
    """The program that cells share, and the graphs of their halves; None for a half that they lack."""

    program: CellProgram
    forward: StageShape | None
    backward: StageShape | None

    @property
    def serial(self) -> KindOfCell:
        return self._replace(program=serial(self.program.kind, self.forward, self.backward))

    @property
    def opened_early(self) -> KindOfCell:
        return self._replace(program=replace(self.program, opens_late=False))


@dataclass(frozen=True, eq=False)
class GroupPricing:
    """A step of the ranks of an expert group, in the unit of the costs.

    timelines differ by expert rank: ``timeline`` is that of ``rank``, whose step ends last.
    ends: [ranks] when each of them ends. compute: [cells, ranks] time of segments.
    carried, exposed, waiting: [lanes, cells, ranks] as in `schedc.cell.group.GroupPlayed`.
    rows: [ranks] mean factor of each rank. among: who exchanges with whom; None: all with all.
    """

    timeline: Timeline
    rank: int
    ends: Floats
    compute: Floats
    carried: Floats
    exposed: Floats
    waiting: Floats
    rows: Floats
    among: ExpertRanks | None = None

    def inside(self, kind: KindOfCell, costs: CellCosts) -> list[Played]:
        """[ranks] a cell of one kind at the mean rows of each rank, which all ranks begin together."""
        return play_ranks(GroupTasks.of(*kind, costs, self.among), self.rows.reshape(1, 1, -1))

    @cached_property
    def by_rank(self) -> dict[str, Floats]:
        """[ranks] compute, communication, exposed and waiting time of each rank, summed over its cells."""
        lanes = {"communication": self.carried, "exposed": self.exposed, "waiting": self.waiting}
        return {"compute": self.compute.sum(axis=0)} | {name: spent.sum(axis=(0, 1)) for name, spent in lanes.items()}

    def communication(self, cells: np.ndarray[tuple[int], np.dtype[np.bool_]] | slice) -> tuple[float, float]:
        """(time, exposed) of the exchanges of some cells, the mean over the ranks of the group."""
        carried, exposed = (spent[:, cells].sum(axis=(0, 1)).mean() for spent in (self.carried, self.exposed))
        return float(carried), float(exposed)


def price_group(
    dependencies: Dependencies,
    kinds: Sequence[KindOfCell],
    kind: Int64,
    costs: CellCosts,
    group: RankRows,
    p2p: float = 0.0,
    closed: bool = False,
    walk: LaneWalk | None = None,
) -> GroupPricing:
    """Simulates all ranks of a group in step, cell after cell.

    kind: [cells] index into ``kinds``. p2p: latency of a message, in the unit of ``costs``. closed: cells begin when
    all their messages are there, and their messages leave at their ends. A gradient leaves no sooner than an activation
    that its cell sends. walk: lanes of works beside the cells.
    """
    levels = dependencies.levels
    if levels.stuck.size:
        raise CompilerBug("timeline", f"a schedule with a deadlock, at cells {levels.stuck[:4]}")
    times = _TaskTimes(dependencies, [GroupTasks.of(*of, costs, group.ranks) for of in kinds], group)
    cells, ranks = len(dependencies), group.factors.shape[2]
    there, arrival = np.zeros((3, cells + 1, ranks)), np.zeros((3, cells, ranks))
    compute, lanes = np.zeros((cells, ranks)), np.zeros((3, len(EXCHANGE_LANES), cells, ranks))
    waits = np.stack([dependencies.previous, *dependencies.producers]).astype(np.int64)
    after = np.concatenate([np.zeros((1, cells)), dependencies.remote * p2p])[:, :, None]
    row = np.arange(3)[:, None]
    for low, high in pairwise(levels.start.tolist()):
        now = levels.order[low:high]
        arrived = there[row, waits[:, now]] + after[:, now]
        if walk:
            arrived[0] = walk.reach(now, arrived[0])
        arrival[:, now] = arrived.max(axis=0) if closed else arrived
        for number in np.unique(kind[now]).tolist():
            batch = now[kind[now] == number]
            played = play_group(times.cells[number], times.of(number, batch), arrival[:, batch])
            there[:, batch] = played.outs[0] if closed else played.outs
            behind = batch[dependencies.sends_activation[batch]]
            there[2, behind] = there[1:, behind].max(axis=0)
            compute[batch] = played.compute
            lanes[:, :, batch] = played.carried, played.exposed, played.waiting
    ends = there[0].max(axis=0) if walk is None else walk.close(there[0, :-1]).max(axis=0, initial=0.0)
    last = int(ends.argmax())
    busy = compute[:, last] + lanes[1:, :, :, last].sum(axis=(0, 1))
    end, reached = there[0, :-1, last], arrival[:, :, last]
    timeline = timeline_of(dependencies, busy, end, reached + (end - busy - reached.max(axis=0)))
    timeline = replace(timeline, makespan=float(ends[last]))
    carried, exposed, waiting = lanes
    rows = group.factors.mean(axis=(0, 1))
    return GroupPricing(timeline, last, ends, compute, carried, exposed, waiting, rows, group.ranks)


class _TaskTimes:
    """Times of the tasks of cells on every rank, by their stages and microbatches."""

    def __init__(self, dependencies: Dependencies, cells: Sequence[GroupTasks], group: RankRows) -> None:
        schedule = dependencies.schedule
        first, last = dependencies.first, np.where(dependencies.second >= 0, dependencies.second, dependencies.first)
        self.cells, self.group = cells, group
        columns = schedule.stage.astype(np.int64), schedule.microbatch.astype(np.int64)
        self.halves = [(columns[0][rows], columns[1][rows]) for rows in (first, last)]
        constant = group.factors.shape[:2] == (1, 1)
        self.alike = [task_times(cell, group.factors, group.factors) for cell in cells] if constant else None

    def of(self, number: int, cells: Int64) -> list[Floats]:
        """[tasks][cells or 1, ranks] times of these cells, all of one kind."""
        if self.alike is not None:
            return self.alike[number]
        return task_times(self.cells[number], *(self._factors(half, cells) for half in self.halves))

    def _factors(self, half: tuple[Int64, Int64], cells: Int64) -> Floats:
        """[layers of the stage or 1, cells, ranks] factors of the cells in one half."""
        stage, microbatch = (column[cells] for column in half)
        first, count = self.group.layers
        layers = max(int(count[stage[0]]), 1)
        known = np.minimum(first[stage] + np.arange(layers)[:, None], len(self.group.factors) - 1)
        return np.asarray(self.group.factors[known, microbatch])
