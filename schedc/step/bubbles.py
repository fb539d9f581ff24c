"""Why ranks are idle: every idle interval of a timeline, split into classes whose sums are the bubble."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Floats, Int32, Int64, bincount
from schedc.step.cell_durations import cell_classes
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import Timeline, durations
from schedc.step.work_runs import WorkRuns

CLASSES = ("warm-up", "cooldown", "dependency", "message", "imbalance")
WARM_UP, COOLDOWN, DEPENDENCY, MESSAGE, IMBALANCE = range(len(CLASSES))

RUN_CLASSES = (*CLASSES, "overhead")
"""Classes of `classify_run`: those of `classify`, some of them always 0, and what only a run has."""
OVERHEAD = len(CLASSES)

WORK_CLASSES = (*RUN_CLASSES, "exposed")
"""Classes of a step with works: time at JOINs has a class of its own."""
EXPOSED = len(RUN_CLASSES)

_ROUNDING = 1e-12
"""Times below this share of the makespan are what rounding left over."""


@dataclass(frozen=True, eq=False)
class Bubbles:
    """The idle intervals (gaps) of all ranks between time 0 and the makespan, in order of rank and time.

    A gap before a rank's first cell is *warm-up*, one after its last *cooldown*, whole. A gap before another cell c is
    a wait for the producer that `Timeline.bound_by` names. Two chains of waits lead to the gap; each follows
    `Timeline.bound_by` back to time 0. The first chain ends at the arrival of the producer's output, the second at the
    end of the cell before c. The two chains split the gap, in this order:

    *imbalance*: how much shorter the gap would be if every cell on the two chains took the mean time of its kind over
        the whole schedule. An overlapped pair is a kind of its own. At least 0 and at most the gap; 0 where all stages
        cost the same.
    *message*: p2p latencies that the first chain has more than the second, at most the rest of the gap. 0 where p2p
        is 0.
    *dependency*: what is left: the order makes the rank wait for another rank's cell.
    *exposed*: with works alone, and before the others: the rank stands at the JOINs of works.

    rank, start, end: [gaps], times in the unit of the costs.
    cell: [gaps] the cell that runs after the gap, -1 for cooldown. The rank waited for the cell's ``bound_by``.
    parts: [classes, gaps] time of the gap in each of `CLASSES`, or of `WORK_CLASSES`; a column sums to end - start.
    totals: [classes, P] the same per rank; a column sums to `Timeline.bubble`.
    """

    rank: Int64
    start: Floats
    end: Floats
    cell: Int64
    parts: Floats
    totals: Floats

    def __len__(self) -> int:
        return int(self.rank.size)


def classify(timeline: Timeline, costs: Costs | None = None, works: WorkRuns | None = None) -> Bubbles:
    """The gaps of a timeline that `simulate` made with these costs, classed; with works by `WORK_CLASSES`.

    Raises `DiagnosticError` (S404) for costs of another number of stages.
    """
    of_stage = (costs or Costs()).resolved(timeline.dependencies.schedule.stages)
    return classify_cells(timeline, durations(timeline.dependencies, of_stage), of_stage.p2p, works)


def classify_cells(
    timeline: Timeline, duration: Floats, latency: float = 0.0, works: WorkRuns | None = None
) -> Bubbles:
    """`classify` where cells take ``duration``, [cells], and messages ``latency``."""
    dependencies = timeline.dependencies
    gaps, inner = _outer(timeline, len(CLASSES) if works is None else len(WORK_CLASSES))
    length, parts = (gaps.end - gaps.start)[inner], gaps.parts
    if works is not None:
        parts[EXPOSED, inner] = works.exposed_in(gaps.rank, gaps.start, gaps.end)[inner]
        length = length - parts[EXPOSED, inner]
    waiting = gaps.cell[inner]
    chains = timeline.bound_by[waiting], dependencies.previous[waiting]
    excess, hops = _excess(timeline, duration, *chains)
    parts[IMBALANCE, inner] = np.clip(excess, 0.0, length)
    left = length - parts[IMBALANCE, inner]
    parts[MESSAGE, inner] = np.clip(latency * hops, 0.0, left)
    parts[DEPENDENCY, inner] = left - parts[MESSAGE, inner]
    return _summed(gaps, dependencies.rank_start.size - 1)


def classify_run(timeline: Timeline) -> Bubbles:
    """The gaps of a timeline that was measured (`schedc.step.timeline.observed`), with `RUN_CLASSES`.

    *warm-up* and *cooldown* as in `Bubbles`. A gap before another cell is *dependency* until the cell's producers have
    ended, and *overhead* from then on: messages, and what the host does between two cells. A clock cannot tell
    *message* and *imbalance*, which are 0.
    """
    gaps, inner = _outer(timeline, len(RUN_CLASSES))
    start, end = gaps.start[inner], gaps.end[inner]
    computed = timeline.end[timeline.bound_by[gaps.cell[inner]]]
    gaps.parts[DEPENDENCY, inner] = np.clip(computed, start, end) - start
    gaps.parts[OVERHEAD, inner] = end - np.clip(computed, start, end)
    return _summed(gaps, timeline.dependencies.rank_start.size - 1)


def _outer(timeline: Timeline, classes: int) -> tuple[Bubbles, Int64]:
    """The gaps, classed where they lie before a rank's first cell or after its last; and indices of the other gaps."""
    dependencies = timeline.dependencies
    rank, start, end, cell, last = _gaps(timeline)
    parts = np.zeros((classes, rank.size))
    first = (cell >= 0) & (dependencies.previous[cell] < 0) if len(dependencies) else ~last
    parts[WARM_UP, first] = (end - start)[first]
    parts[COOLDOWN, last] = (end - start)[last]
    return Bubbles(rank, start, end, cell, parts, np.zeros((classes, 0))), np.flatnonzero(~first & ~last)


def _summed(gaps: Bubbles, ranks: int) -> Bubbles:
    totals = np.stack([bincount(gaps.rank, part, ranks) for part in gaps.parts]).astype(float)
    return replace(gaps, totals=totals)


def critical_path(timeline: Timeline) -> Int64:
    """[path] The cells of a longest chain of waits, from one that starts at 0 to the last end, in order of time.

    Where several cells end last, the path ends at the one of the lowest rank. Where a cell waited for several things
    at once, the path follows the one that `Timeline.bound_by` names.
    """
    path = []
    cell = int(timeline.end.argmax()) if timeline.end.size else -1
    while cell >= 0:  # no chain is longer than there are levels
        path.append(cell)
        cell = int(timeline.bound_by[cell])
    return np.array(path[::-1], np.int64)


def _gaps(timeline: Timeline) -> tuple[Int64, Floats, Floats, Int64, npt.NDArray[np.bool_]]:
    """(rank, start, end, cell after it or -1, whether it is the rank's last) of every gap, by rank and time."""
    dependencies, ranks = timeline.dependencies, timeline.dependencies.rank_start.size - 1
    free = np.zeros(len(dependencies))
    behind = dependencies.previous >= 0
    free[behind] = timeline.end[dependencies.previous[behind]]
    filled = dependencies.rank_start[:-1] < dependencies.rank_start[1:]
    done = np.zeros(ranks)
    done[filled] = timeline.end[dependencies.rank_start[1:][filled] - 1]
    rank = np.concatenate([dependencies.rank, np.arange(ranks)]).astype(np.int64)
    start = np.concatenate([free, done])
    end = np.concatenate([timeline.start, np.full(ranks, timeline.makespan)])
    cell = np.concatenate([np.arange(len(dependencies)), np.full(ranks, -1)])
    idle = np.flatnonzero(end - start > _ROUNDING * timeline.makespan)
    order = idle[np.lexsort((start[idle], rank[idle]))]
    return rank[order], start[order], end[order], cell[order], cell[order] < 0


def _excess(timeline: Timeline, duration: Floats, producer: Int64, before: Int32) -> tuple[Floats, Floats]:
    """(time above the mean, messages) by which the chain to each producer's arrival exceeds that to the end of the
    cell before. What the two chains have in common cancels."""
    dependencies = timeline.dependencies
    deviation = _deviation(dependencies, duration)
    sent = np.zeros(len(dependencies))
    waits = np.flatnonzero(timeline.bound_by >= 0)
    sent[waits] = dependencies.rank[timeline.bound_by[waits]] != dependencies.rank[waits]
    above, hops = deviation.copy(), sent
    for low, high in pairwise(dependencies.levels.start.tolist()):
        cells = dependencies.levels.order[low:high]
        cells = cells[timeline.bound_by[cells] >= 0]
        above[cells] += above[timeline.bound_by[cells]]
        hops[cells] += hops[timeline.bound_by[cells]]
    return above[producer] - above[before], hops[producer] + 1 - hops[before]


def _deviation(dependencies: Dependencies, duration: Floats) -> Floats:
    """[cells] duration less the mean over the cells of the same kind; exactly 0 where they do not differ."""
    _, classes = cell_classes(dependencies, 1)
    mean = (bincount(classes, duration) / bincount(classes))[classes]
    difference = duration - mean
    return np.where(np.abs(difference) <= _ROUNDING * mean, 0.0, difference)
