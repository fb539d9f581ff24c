"""States the problem that is searched: cells with durations on ranks, arcs between them, and memory that they hold.

A *cell* is an op, or an overlapped pair. The microbatches of a pipe are alike, so their ops on one stage can be
exchanged. The search therefore keeps the sequence of microbatches that the seed has on each stage, separately for
forwards, backwards and weight gradients.

This loses no order if the sequence is the same on all stages (first in, first out) and every stage splits all of its
backwards or none. Proof: number the k-th forward, the k-th backward and the k-th weight gradient of every stage k.
Each op still starts after what it needs. If the k-th op of one sequence starts at t, then k ops of the sequence before
it have ended by t, so the first k of them have. Times and memory do not change. Otherwise, keeping the sequence is a
restriction (`SearchProblem.limits`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.arrays import Bools, Floats, Int32, Int64, repeat
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.search.split import split_backwards
from schedc.search.ticks import TickGrid, grid_for
from schedc.step.costs.costs import Costs, StageCosts
from schedc.step.costs.given import check_given
from schedc.step.dependencies import Dependencies, needs_of
from schedc.step.durations import alone, duration
from schedc.step.timeline import durations
from schedc.units import plain

F, I, W, B = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741

PAIRS_KEPT = "the pairs of the seed are kept, with their partners"
NO_PAIRS = "no pairs"
SEQUENCE = "microbatches in the sequence that the seed has on each stage"
SPLIT_AS_SEED = "the backwards that the seed splits stay split, and only they"
ALL_SPLIT = "every backward split"


class CapUnit(NamedTuple):
    """The unit of caps and peaks for people. size: in the unit of the cost `activation`. name: empty for that unit."""

    size: float = 1.0
    name: str = ""

    def amount(self, value: float) -> str:
        """A memory in the unit of the cost `activation`, for people: ``4 microbatches``."""
        name = self.name.removesuffix("es") if value == self.size else self.name
        return f"{value / self.size:.10g} {name}".rstrip()

    def numbers(self, values: Floats) -> str:
        """Memories in this unit with six digits, rounded up to be caps in turn: ``1.25, 2.33334``."""
        return ", ".join(plain(value, up=True) for value in (values / self.size).tolist())

    def __str__(self) -> str:
        return f"in {self.name} of a rank" if self.name else "in the unit of the cost `activation`"


def cap_unit(schedule: Schedule, costs: Costs) -> CapUnit:
    """Microbatches of a rank, which hold 1 in each chunk; the unit of the cost `activation` where that is not 1."""
    if costs.activation != Costs().activation:
        return CapUnit()
    return CapUnit(schedule.stages // schedule.ranks * schedule.segments, "microbatches")


@dataclass(frozen=True, eq=False)
class MemoryHolds:
    """Memory held by ranks: from the start of cell ``taken`` (from its end if ``late``) to the end of cell ``freed``.

    taken, freed: [holds] cells. late: [holds]. amount: [holds] ticks of the memory grid.
    """

    taken: Int64
    late: Bools
    freed: Int64
    amount: Int64


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """The orders of a seed's cells that are searched.

    dependencies: those of the seed as it is searched: pairs dissolved if requested, W in the sequence of I.
    time: grid of all times. A cell of zero duration takes one tick, so that every cell has a place in an order.
    borrowed: number of these ticks. refined: factor by which the grid is finer than the exact one, so that all borrowed
        ticks together are less than one tick of the exact grid.
    duration: [cells] ticks.
    before, after, lag: [arcs] cell ``after`` starts at least ``lag`` ticks after the end of cell ``before``.
    memory: grid of memory. holds: memory that cells hold. capacity: [P] ticks of the memory grid; None without a cap.
    cap_unit: what memory is shown in.
    gain: [P] ticks by which a pair on the rank is at most shorter than both of its ops; 0 where pairs are not made.
    limits: restrictions of the search beyond legality and the cap, in words.
    """

    dependencies: Dependencies
    time: TickGrid
    refined: int
    borrowed: int
    duration: Int64
    before: Int64
    after: Int64
    lag: Int64
    memory: TickGrid
    holds: MemoryHolds
    capacity: Int64 | None
    gain: Int64
    limits: tuple[str, ...]
    cap_unit: CapUnit

    @property
    def schedule(self) -> Schedule:
        return self.dependencies.schedule

    def __len__(self) -> int:
        return len(self.dependencies)

    @property
    def independent(self) -> bool:
        """Whether microbatches can run one after another. The least memory of every rank is then known."""
        return not {PAIRS_KEPT, SEQUENCE, ALL_SPLIT} & set(self.limits)

    def cost(self, ticks: int, slack: int = 0) -> float:
        """The least value in units of cost that ``ticks`` or more correspond to. slack: ticks of rounding to allow."""
        least = ticks - self.borrowed - slack
        if self.time.exact:
            return -(-least // self.refined) / (self.time.ticks / self.refined)
        return self.time.cost(least)


@dataclass(frozen=True)
class Freedom:
    """What may differ from the seed besides the order.

    keep_pairs: overlapped pairs stay, with their partners. Otherwise every op is a cell of its own.
    split: every full backward may be split. It is joined if in the end its W directly follows its I and nothing is
        lost.
    make_pairs: any F and any backward of a rank may be a pair. The cells of the problem are single ops, as short as in
        their shortest pair, and its bounds hold for orders with such pairs. ``keep_pairs`` is not read.
    """

    keep_pairs: bool = True
    split: bool = False
    make_pairs: bool = False


def problem_of(seed: Schedule, costs: Costs, caps: Floats | None, freedom: Freedom) -> SearchProblem:
    """The problem that a legal schedule poses under these costs.

    caps: [P] memory that a rank may hold, in the unit of ``costs.activation``; None for no cap.
    Raises `DiagnosticError` (S415) for pairs to make under costs that differ by microbatch.
    """
    schedule = searched_ops(seed, freedom)
    check_given(costs, schedule)
    dependencies = Dependencies.of(schedule)
    stage_costs = costs.resolved(schedule.stages)
    times = durations(dependencies, stage_costs)
    gain, paired = np.zeros(schedule.ranks), times[:0]
    if freedom.make_pairs:
        if costs.microbatches:
            raise DiagnosticError([Diagnostic("S415", "pairs are not made under costs that differ by microbatch")])
        least, gain, paired = _pair_times(schedule, stage_costs)
        times = np.minimum(times, least[schedule.kind, schedule.stage][dependencies.first])
    time, refined, borrowed = _time_grid(times, np.append(paired, stage_costs.p2p))
    duration = np.maximum(time.down(times), 1)
    memory, holds = _holds(dependencies, stage_costs, caps)
    capacity = None if caps is None else memory.down(caps * (1 + 1e-12))
    arcs = _arcs(dependencies, int(time.down(np.array([stage_costs.p2p]))[0]))
    if caps is not None:
        room = _room(dependencies, stage_costs, caps)
        arcs = np.concatenate([arcs, room], axis=1)
    before, after, lag = np.unique(arcs, axis=1)
    limits = tuple(text for text in _limits(seed, schedule, stage_costs) if text != NO_PAIRS or not freedom.make_pairs)
    return SearchProblem(
        dependencies,
        time,
        refined,
        borrowed,
        duration,
        before,
        after,
        lag,
        memory,
        holds,
        capacity,
        time.up(gain),
        limits,
        cap_unit(seed, costs),
    )


def searched_ops(seed: Schedule, freedom: Freedom) -> Schedule:
    """The seed as it is searched: W in the sequence of I, backwards split and pairs dissolved as ``freedom`` says."""
    schedule = split_backwards(seed) if freedom.split else seed
    key = stage_key(schedule)
    rows_i, rows_w = (_by_key(key, np.flatnonzero(schedule.kind == kind)) for kind in (I, W))
    microbatch = schedule.microbatch.copy()
    microbatch[rows_w] = schedule.microbatch[rows_i]
    kept = freedom.keep_pairs and not freedom.make_pairs
    pair = schedule.pair if kept else np.full(len(schedule), -1, np.int32)
    return replace(schedule, microbatch=microbatch, pair=pair)


def stage_key(schedule: Schedule) -> Int64:
    """[ops] a number that identifies the stage and the pipe of each op."""
    pipe = schedule.placement.pipe_of_microbatch(schedule.microbatch)
    return pipe.astype(np.int64) * schedule.stages + schedule.stage


def _by_key(key: Int64, rows: Int64) -> Int64:
    """The rows sorted by key, in order within each key."""
    return rows[np.argsort(key[rows], kind="stable")]


def _pair_times(schedule: Schedule, costs: StageCosts) -> tuple[Floats, Floats, Floats]:
    """The pairs of a forward and a backward that ranks may make, by the stages of both.

    Returns [kinds, stages], [P] and [pairs]. The first are the shortest times of ops, alone or in a pair. The second
    are the most that a pair of the rank is shorter than these times of its ops. The last are the times of all pairs.
    """
    least, gain = alone(costs), np.zeros(schedule.ranks)
    pairs: list[tuple[int, OpKind, Int64, Int64, Floats]] = []
    for rank in range(schedule.ranks):
        own = schedule.rank == rank
        forward = np.unique(schedule.stage[own & (schedule.kind == F)])
        for kind in (B, I):
            backward = np.unique(schedule.stage[own & (schedule.kind == kind)])
            first, second = repeat(forward, backward.size), np.tile(backward, forward.size)
            times = duration(costs, F, kind, (first, second))
            np.minimum.at(least[F], first, times)
            np.minimum.at(least[kind], second, times)
            pairs.append((rank, kind, first, second, times))
    for rank, kind, first, second, times in pairs:
        gain[rank] = max(gain[rank], (least[F][first] + least[kind][second] - times).max(initial=0))
    return least, gain, np.concatenate([times for *_, times in pairs])


def _time_grid(times: Floats, more: Floats) -> tuple[TickGrid, int, int]:
    """The grid of times, its factor ``refined``, and the number of borrowed ticks. times: [cells] in units of cost.

    more: [n] other times that shall be exact, of which a cell waits for two at most.
    """
    longest = max(float(times.sum()) + 2 * times.size * float(more.max()), 1e-300)
    grid = grid_for(np.append(times, more), longest)
    borrowed = int((grid.down(times) == 0).sum())
    refined = borrowed + 1 if grid.exact else 1
    return TickGrid(grid.ticks * refined, grid.exact), refined, borrowed


def _arcs(dependencies: Dependencies, latency: int) -> Int64:
    """[3, arcs] before, after and lag: the arcs of the data flow, and of the sequences on each stage."""
    schedule, cell = dependencies.schedule, dependencies.cell_of
    parts = []
    for before in needs_of(schedule):
        (after,) = np.nonzero(before >= 0)
        before = before[after]
        parts.append(_pairs(cell[before], cell[after], latency * (schedule.rank[before] != schedule.rank[after])))
    key = stage_key(schedule) * 3 + TURN[schedule.kind]
    rows = _by_key(key, np.arange(len(schedule)))
    next_to = key[rows[1:]] == key[rows[:-1]]
    parts.append(_pairs(cell[rows[:-1][next_to]], cell[rows[1:][next_to]], 0))
    return np.concatenate(parts, axis=1)


def _pairs(before: Int64 | Int32, after: Int64 | Int32, lag: Int64 | int) -> Int64:
    """[3, arcs] from the cells before and after ([arcs]) and their lags, one or [arcs]."""
    return np.stack([before, after, np.broadcast_to(np.asarray(lag, np.int64), before.shape)])


def _holds(dependencies: Dependencies, costs: StageCosts, caps: Floats | None) -> tuple[TickGrid, MemoryHolds]:
    """The grid of memory, and the holds of activations and pending weight gradients.

    An activation and its pending weight gradient are one hold if both are equally large.
    """
    schedule, cell = dependencies.schedule, dependencies.cell_of
    values = np.concatenate([costs.activation, costs.pending_weight, [1.0] if caps is None else caps])
    grid = grid_for(values, max(float(values.max()) * len(schedule), 1e-300))
    slots = schedule.stages * schedule.microbatches
    slot = schedule.stage.astype(np.int64) * schedule.microbatches + schedule.microbatch
    row = np.full((len(OpKind), slots), -1)
    row[schedule.kind, slot] = np.arange(len(schedule))
    stage = np.arange(slots) // schedule.microbatches
    held, pending = grid.down(costs.activation)[stage], grid.down(costs.pending_weight)[stage]
    split = row[I] >= 0
    whole = ~split | (held == pending)
    until = np.where(split & whole, row[W], np.maximum(row[B], row[I]))
    rest = np.flatnonzero(~whole)
    taken = np.concatenate([cell[row[F]], cell[row[I][rest]]])
    freed = np.concatenate([cell[until], cell[row[W][rest]]])
    late = np.arange(taken.size) >= slots
    amount = np.concatenate([held, pending[rest]])
    real = amount > 0
    return grid, MemoryHolds(taken[real], late[real], freed[real], amount[real])


def _room(dependencies: Dependencies, costs: StageCosts, caps: Floats) -> Int64:
    """[3, arcs] arcs that a cap implies between the ops of one stage.

    If n activations of the stage fill the cap, forward k waits until activation k - n is freed. The cap implies these
    arcs, but with them bounds are tighter and the search is faster. Only stages whose backwards follow the sequence of
    their forwards have them.
    """
    schedule, cell = dependencies.schedule, dependencies.cell_of
    key = stage_key(schedule)
    parts = [np.zeros((3, 0), np.int64)]
    for number in np.unique(key).tolist():
        rows = np.flatnonzero(key == number)
        stage, rank = int(schedule.stage[rows[0]]), int(schedule.rank[rows[0]])
        kind = schedule.kind[rows]
        forward, backward, weight = (rows[np.isin(kind, kinds)] for kinds in ((F,), (B, I), (W,)))
        in_turn = np.array_equal(schedule.microbatch[forward], schedule.microbatch[backward])
        if not in_turn or costs.activation[stage] <= 0:
            continue
        n = int(caps[rank] * (1 + 1e-12) // costs.activation[stage])
        whole = weight.size == forward.size and costs.pending_weight[stage] >= costs.activation[stage]
        if 0 < n < forward.size:
            parts.append(_pairs(cell[(weight if whole else backward)[:-n]], cell[forward[n:]], 0))
    return np.concatenate(parts, axis=1)


def _limits(seed: Schedule, schedule: Schedule, costs: StageCosts) -> tuple[str, ...]:
    """The restrictions that keep the search from covering every order of the seed's ops, in words."""
    paired = bool((seed.pair >= 0).any())
    still_paired = bool((schedule.pair >= 0).any())
    times = alone(costs)
    split, pair = times[I] + times[W], (np.arange(schedule.stages), np.arange(schedule.stages))
    apart = times[F] + np.maximum(times[B], split).max()
    pays = costs.FB is not None and bool((apart > duration(costs, F, B, pair)).any())
    dear = (split > times[B]) | (costs.pending_weight > costs.activation)
    applies = {
        PAIRS_KEPT: still_paired,
        NO_PAIRS: not still_paired and (paired or pays),
        SEQUENCE: costs.microbatches is not None or not _in_turn(schedule),
        SPLIT_AS_SEED: _mixed(schedule),
        ALL_SPLIT: len(schedule) > len(seed) and bool(dear.any()),
    }
    return tuple(text for text, holds in applies.items() if holds)


def _in_turn(schedule: Schedule) -> bool:
    """Whether all stages of a pipe run forwards and backwards in the same sequence of microbatches."""
    pipe = schedule.placement.pipe_of_microbatch(schedule.microbatch)
    key = stage_key(schedule) * 2 + TURN[schedule.kind]
    rows = _by_key(key, np.flatnonzero(schedule.kind != W))
    for number in range(schedule.placement.pipes):
        sequences = schedule.microbatch[rows[pipe[rows] == number]].reshape(2 * schedule.stages, -1)
        if (sequences != sequences[0]).any():
            return False
    return True


def _mixed(schedule: Schedule) -> bool:
    """Whether some stage of a pipe splits some of its backwards, but not all."""
    key = stage_key(schedule)
    return bool(np.intersect1d(key[schedule.kind == B], key[schedule.kind == I]).size)
