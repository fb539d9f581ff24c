"""Prices a schedule on all ranks of an expert group in step, where these have different numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedc.cell.costs import OF_ROWS, CellCosts
from schedc.cell.graph import EXCHANGE_LANES, Lane, StageShape
from schedc.cell.group import GroupTasks, task_times
from schedc.cell.issue_order import ExpertRanks
from schedc.cell.program import CellProgram, graph_of
from schedc.cell.serial import serial
from schedc.ir.arrays import Floats, Int32, Int64
from schedc.step.cells.played_cells import PlayedCell, RankSets, play
from schedc.step.cells.step_copies import StepCopies, Travels, copy_cells
from schedc.step.dependencies import Dependencies
from schedc.step.lowering import lower
from schedc.step.placed_works import TimedWorks
from schedc.step.timeline import Timeline, arrivals, timeline_of
from schedc.step.walk import run
from schedc.step.work_lowering import Gaps


def layers_of(shape: StageShape) -> int:
    """Number of layers with experts of a stage."""
    return 1 + max((node.layer for node in shape.nodes if node.role in OF_ROWS), default=-1)


@dataclass(frozen=True, eq=False)
class RankRows:
    """The ranks of an expert group.

    factors: [layers or 1, microbatches or 1, ranks] rows over the rows that the costs are for (`schedc.cell.rows`).
    ranks: who exchanges with whom; None: all with all.
    shapes: [stages] graphs of the stages, whose layers with experts are those of the factors, in this order.
    microbatches: [stages or 1, microbatches] factors of all times of cells; None where all microbatches cost the same.
    copies: [layers, microbatches, ranks] copies of experts on the fuller direction of a rank's links, whose costs are
    for the mean of the busiest ranks; None: the exchange of copies always takes as long.
    for_step: copies that last for the step; None without any. links: by lane [layers, microbatches, ranks] rows on a
    rank's links over those that the costs are for; None: the rows that it computes.
    """

    factors: Floats
    shapes: Sequence[StageShape]
    ranks: ExpertRanks | None = None
    microbatches: Floats | None = None
    copies: Floats | None = None
    for_step: StepCopies | None = None
    links: Mapping[Lane, Floats] | None = None

    @property
    def differ(self) -> bool:
        """Whether ranks have different rows. Else one rank has microbatches of unequal cost."""
        return self.microbatches is None or self.factors.size > 1

    @property
    def alike(self) -> bool:
        """Whether all cells of a form have the same factors."""
        known = self.microbatches, self.copies, self.links
        return all(each is None for each in known) and self.factors.shape[:2] == (1, 1)

    def scales(self, stage: Int64, microbatch: Int32) -> Floats:
        """[cells, 1] factors of all times in one half of cells. stage, microbatch: [cells]."""
        if self.microbatches is None:
            return np.ones((1, 1))
        return np.asarray(self.microbatches[np.minimum(stage, len(self.microbatches) - 1), microbatch, None])

    @cached_property
    def layers(self) -> tuple[Int64, Int64]:
        """[stages] the first layer with experts of each stage among those of all stages, and their number."""
        count = np.array([layers_of(shape) for shape in self.shapes], np.int64)
        return np.cumsum(count) - count, count

    def of(self, stage: Int64, microbatch: Int32) -> Floats:
        """[layers of the stage or 1, cells, ranks] factors of cells with equal graphs. stage, microbatch: [cells]."""
        return self._in_cells(self.factors, stage, microbatch)

    def _in_cells(self, table: Floats, stage: Int64, microbatch: Int32) -> Floats:
        if table.shape[:2] == (1, 1):
            return table
        first, count = self.layers
        layers = max(int(count[stage[0]]), 1)
        known = np.minimum(first[stage] + np.arange(layers)[:, None], len(table) - 1)
        return np.asarray(table[known, microbatch])

    @cached_property
    def _copies_over_mean(self) -> Floats | None:
        """`copies` over the mean of the busiest ranks."""
        if self.copies is None:
            return None
        mean = self.copies.max(axis=2).mean()
        return np.asarray(self.copies / mean if mean else self.copies)

    def copies_of(self, halves: Sequence[tuple[Int64, Int32]]) -> tuple[Floats, Floats] | None:
        """Factors of the copies in both halves of cells; None where they have none. halves: as of `of`."""
        table = self._copies_over_mean
        if table is None:
            return None
        forward, backward = (self._in_cells(table, *half) for half in halves)
        return forward, backward

    def links_of(self, halves: Sequence[tuple[Int64, Int32]]) -> dict[Lane, tuple[Floats, Floats]]:
        """By lane factors of rows on links in both halves of cells. halves: as of `of`."""
        (one, two), links = halves, self.links or {}
        return {lane: (self._in_cells(table, *one), self._in_cells(table, *two)) for lane, table in links.items()}

    @property
    def cheapest(self) -> float:
        """The least factor of a microbatch."""
        return 1.0 if self.microbatches is None else float(self.microbatches.min())

    @property
    def least(self) -> tuple[float, float]:
        """The largest factor that some rank has in all layers and microbatches at least, and that of its links."""
        each = self.factors.min(axis=(0, 1))
        rank = int(each.argmax())
        links = [float(table[:, :, rank].min()) for table in (self.links or {}).values()]
        return float(each[rank]), min(links, default=float(each[rank]))


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
    carried, exposed, waiting: [lanes, cells, ranks] as in `schedc.step.cells.played_cells`.
    rows: [ranks] mean factor of each rank. among: who exchanges with whom; None: all with all.
    works: [works] mean time that ranks stand at the JOIN of each; None without works.
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
    works: Floats | None = None

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
    works: TimedWorks | None = None,
    walked: Callable[[list[PlayedCell], Int64, Int32, Floats], None] | None = None,
) -> GroupPricing:
    """Simulates all ranks of a group in step: each is a column of the walk.

    kind: [cells] index into ``kinds``. p2p: latency of a message, in the unit of ``costs``. closed: cells begin when
    all their messages are there, and their messages leave at their ends. A gradient leaves no sooner than an activation
    that its cell sends. works: what runs beside the cells. walked: gets the forms of cells, [cells] the form
    and the first instruction of each, and [n, ranks] the values of the walk.
    """
    tasks = [GroupTasks.of(*of, costs, group.ranks) for of in kinds]
    times, add_row = _task_rows(dependencies, tasks, kind, group)
    sets = RankSets(group.factors.shape[2])
    played = [play(of, sets, closed, behind) for of in tasks for behind in (False, True)]
    form = 2 * kind + dependencies.sends_activation
    if group.for_step is not None:
        times = _with_copies(dependencies, group, played, form, times, add_row)
    gaps = None if works is None else Gaps(dependencies, works.placed)
    cells = [each.instructions for each in played]
    lowered = lower(dependencies, cells, form, add_row=add_row, gaps=gaps, works_row=len(times))
    if works is not None:
        times = np.concatenate([times, np.broadcast_to(works.time[:, None], (works.time.size, times.shape[1]))])
    values = run(lowered.walk, np.tile([[0.0], [p2p]], (1, times.shape[1])), times, sets=sets.table)
    values = np.concatenate([values, np.zeros((1, times.shape[1]))])
    if walked is not None:
        walked(played, form, lowered.base, values)
    compute, lanes = _spent(played, form, lowered.base, values, times, add_row)
    ends = values[lowered.closed].max(axis=0, initial=0.0)
    last = int(ends.argmax())
    busy = compute[:, last] + lanes[1:, :, :, last].sum(axis=(0, 1))
    there = values[lowered.outs, last]
    arrival = arrivals(dependencies, there, p2p)
    arrival[0] = values[lowered.reached, last]
    if closed:
        arrival[:] = arrival.max(axis=0)
    timeline = timeline_of(dependencies, busy, there[0], arrival + (there[0] - busy - arrival.max(axis=0)))
    carried, exposed, waiting = lanes
    rows = group.factors.mean(axis=(0, 1))
    stood = None if gaps is None else gaps.times(values)[2].mean(axis=1)
    timeline = replace(timeline, makespan=float(ends[last]))
    return GroupPricing(timeline, last, ends, compute, carried, exposed, waiting, rows, group.ranks, stood)


def _spent(
    played: list[PlayedCell], form: Int64, base: Int32, values: Floats, times: Floats, add_row: Int32
) -> tuple[Floats, Floats]:
    """[cells, ranks] time of segments; [3, lanes, cells, ranks] as in `PlayedCell.spent`."""
    compute = np.zeros((form.size, times.shape[1]))
    lanes = np.zeros((3, len(EXCHANGE_LANES), *compute.shape))
    for number, each in enumerate(played):
        own = np.flatnonzero(form == number)
        if own.size:
            compute[own], lanes[:, :, own] = each.spent(values, base[own], times, add_row[own])
    return compute, lanes


def _with_copies(
    dependencies: Dependencies,
    group: RankRows,
    played: list[PlayedCell],
    form: Int64,
    times: Floats,
    add_row: Int32,
) -> Floats:
    """[rows, ranks] ``times`` with rows for cells with copies of the step, which get forms of their own in ``played``.

    Writes the form and the first row of these cells.
    """
    assert group.for_step is not None
    alike: dict[tuple[int, Travels], int] = {}
    blocks, rows = [times], len(times)
    for cell, travels, time in copy_cells(dependencies, group.for_step, group.layers):
        plain = played[form[cell]]
        if (key := (int(form[cell]), travels)) not in alike:
            alike[key] = len(played)
            played.append(plain.with_copies(travels, group.for_step.lane, group.for_step.members))
        form[cell] = alike[key]
        own = times[add_row[cell] : add_row[cell] + len(plain.tasks.tasks)]
        blocks += [own, np.broadcast_to(time[:, None], (time.size, times.shape[1]))]
        add_row[cell], rows = rows, rows + len(own) + time.size
    return np.concatenate(blocks)


def _task_rows(
    dependencies: Dependencies, cells: Sequence[GroupTasks], kind: Int64, group: RankRows
) -> tuple[Floats, Int32]:
    """[rows, ranks] times of the tasks of all cells, and [cells] the row of the first task of each. kind: [cells]."""
    stage, microbatch = dependencies.schedule.stage, dependencies.schedule.microbatch
    halves = dependencies.first, np.where(dependencies.second >= 0, dependencies.second, dependencies.first)
    tables, row, total = [np.zeros((0, group.factors.shape[2]))], np.zeros(kind.size, np.int32), 0
    for number, cell in enumerate(cells):
        own = np.flatnonzero(kind == number)
        if not own.size:
            continue
        some = own[:1] if group.alike else own
        ops = [(stage[rows[some]].astype(np.int64), microbatch[rows[some]]) for rows in halves]
        scales = [group.scales(*op) for op in ops]
        forward, backward = (group.of(*op) for op in ops)
        each = task_times(cell, forward, backward, group.copies_of(ops), group.links_of(ops))
        times = [
            np.broadcast_to(graph_of(cell.tasks.kind, task.half, *scales) * time, (some.size, time.shape[-1]))
            for task, time in zip(cell.tasks.all, each, strict=True)
        ]
        tables += [np.stack(times, axis=1).reshape(-1, group.factors.shape[2])] if times else []
        row[own] = total + len(times) * (0 if group.alike else np.arange(own.size))
        total += some.size * len(times)
    return np.concatenate(tables), row
