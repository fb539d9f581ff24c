"""Orders the ops of a `timed` block with `fill`, by one loop: over arrays where numba compiles it, else over lists."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.compiled import IMPORT_SECONDS, called_from_loops, compile_seconds, jit
from schedc.ir.ops import PAIR_NAMES, OpKind
from schedc.ir.schedule import Schedule
from schedc.step.choose import ChosenOrder
from schedc.step.costs.costs import Costs, StageCosts
from schedc.step.dependencies import needs_of
from schedc.step.durations import alone, duration
from schedc.step.rules import InTurn

_COMPILE_SECONDS = 3.0
"""What compiling the loop costs, once on a machine."""

PAIRED_TIMES = Costs(F=1.5, I=1.5, W=1.0, FB=3.0)
"""Times that ops take in a `timed pair` block: F, I and W compute for 1 each, and half of that is exposed beside a lone
F or I. This is why pairs are made: F & I takes 2."""

_HELD = np.array([(kind is OpKind.F) - (kind in (OpKind.W, OpKind.B)) for kind in OpKind])
_IN_FLIGHT = np.array([(kind is OpKind.F) - (kind in (OpKind.I, OpKind.B)) for kind in OpKind])
"""[kinds] by how many an op changes the activations that its rank holds, and the microbatches in flight."""


class TurnOps(NamedTuple):
    """What does not change while ranks run the ops of a `timed` block with `fill`.

    rank_start: [P + 1] rows of each rank. turn_stop: [P] place in `TurnState.turn` behind its ops.
    time: [ops] duration, above zero. room: [ops] 1 for a forward, else 0. held, in_flight: [ops] by how many an op
    changes the activations of its rank, and the microbatches in flight. queue: [ops] number of its kind and stage;
    one number for all ops where none may overtake another.
    first, second: [ops] the ops that it needs, as indices of `TurnState.end`.
    weight: [ops] row of the W that follows an I, else -1. most: [P] activations for which a rank has room.
    mate: [ops] row of the second op of a pair, at its first op; else -1. At the first op, ``time``, ``held``,
    ``in_flight`` and ``weight`` are those of the whole pair.
    """

    rank_start: Any
    turn_stop: Any
    time: Any
    room: Any
    held: Any
    in_flight: Any
    queue: Any
    first: Any
    second: Any
    weight: Any
    most: Any
    mate: Any


class TurnState(NamedTuple):
    """What changes. The loop fills ``order`` and ``ran``.

    end: [ops + 2] when each op ends; inf before its start. Behind the ops come an op that never ends and an op that
    ended at 0. turn: single ops other than W, and the first ops of pairs, in the order of their slots.
    order: [ops] rows of each rank in the order of their start, from its first row on.
    weights: [ops] W whose I has started, likewise.
    head: [P] place of the next op in ``turn``. ran, pending, taken: [P] ops that started, W in ``weights``, and started
    W. holds, flying: [P] activations held, and microbatches in flight. free: [P] end of the last op.
    """

    end: Any
    turn: Any
    order: Any
    weights: Any
    head: Any
    ran: Any
    pending: Any
    taken: Any
    holds: Any
    flying: Any
    free: Any


def run_in_turn(ops: TurnOps, state: TurnState) -> None:
    """Runs all ranks by the rule `InTurn`, without latency of messages, until nothing can start.

    A rank can start an op only when one ends, its own or another one: these times are visited, each once.
    """
    rank_start, turn_stop, time, room, held, in_flight, queue, first, second, weight, most, mate = ops
    end, turn, order, weights, head, ran, pending, taken, holds, flying, free = state
    now = 0.0
    while now < inf:
        later = inf
        for rank in range(len(free)):
            place, stop, full, row = head[rank], turn_stop[rank], holds[rank] >= most[rank], -1
            if free[rank] > now:
                later = min(later, free[rank])
                continue
            if place < stop and may_run(turn[place], full, now, room, end, first, second, mate):
                row = turn[place]
                head[rank] += 1
            elif taken[rank] < pending[rank]:
                row = weights[rank_start[rank] + taken[rank]]
                taken[rank] += 1
            elif place + 1 < stop and queue[turn[place]] != queue[turn[place + 1]]:
                full = full or flying[rank] + room[turn[place]] >= most[rank]
                if may_run(turn[place + 1], full, now, room, end, first, second, mate):
                    row = turn[place + 1]
                    turn[place + 1] = turn[place]
                    head[rank] += 1
            if row < 0:
                continue
            order[rank_start[rank] + ran[rank]] = row
            ran[rank] += 1
            if weight[row] >= 0:
                weights[rank_start[rank] + pending[rank]] = weight[row]
                pending[rank] += 1
            holds[rank] += held[row]
            flying[rank] += in_flight[row]
            free[rank] = end[row] = now + time[row]
            if mate[row] >= 0:
                order[rank_start[rank] + ran[rank]] = mate[row]
                ran[rank] += 1
                end[mate[row]] = free[rank]
            later = min(later, free[rank])
        now = later


def may_run(row: int, full: bool, now: float, room: Any, end: Any, first: Any, second: Any, mate: Any) -> bool:
    """Whether the ops that an op or a pair needs have ended. full: whether the rank has no room for a forward."""
    if (full and room[row]) or end[first[row]] > now or end[second[row]] > now:
        return False
    other = mate[row]
    return other < 0 or bool(end[first[other]] <= now and end[second[other]] <= now)


Loop = Callable[[TurnOps, TurnState], None]

_interpreted_seconds = [0.0]


def run_turns(schedule: Schedule, rule: InTurn) -> ChosenOrder:
    """The order by ``rule`` of a schedule whose ops are all of the `timed` block. Ops take their unit costs, and in a
    `timed pair` block those of `PAIRED_TIMES`.

    The loop is compiled once its interpreted runs took as long as loading it. Both ways give the same order.
    """
    ops, state = _turn_ops(schedule, rule), _turn_state(schedule)
    if (loop := _compiled()) is not None:
        loop(ops, state)
        order = state.order
    else:
        began = time.process_time()
        lists = TurnState(*(column.tolist() for column in state))
        run_in_turn(TurnOps(*(column.tolist() for column in ops)), lists)
        _interpreted_seconds[0] += time.process_time() - began
        order = np.array(lists.order, np.int64)
    rows = order[order >= 0]
    second = np.zeros(rows.size, bool)
    second[1:] = ops.mate[rows[:-1]] == rows[1:]
    return ChosenOrder(rows, second)


def _compiled() -> Loop | None:
    if _interpreted_seconds[0] < IMPORT_SECONDS or _interpreted_seconds[0] < IMPORT_SECONDS + _left_to_compile():
        return None
    return load_loop()


@cache
def _left_to_compile() -> float:
    return compile_seconds(Path(__file__), _COMPILE_SECONDS)


@cache
def load_loop() -> Loop | None:
    """The compiled loop, which is used from now on; None without numba."""
    if (compiled := jit()) is None:
        return None
    called_from_loops(may_run)
    _interpreted_seconds[0] = inf
    loop: Loop = compiled(run_in_turn)
    return loop


def _turn_ops(schedule: Schedule, rule: InTurn) -> TurnOps:
    kind, stage = schedule.kind, schedule.stage.astype(np.int64)
    turns, needs, mate = _turns(schedule), needs_of(schedule), _mates(schedule)
    most = np.full(schedule.ranks, np.inf) if rule.most is None else np.array(rule.most, np.float64)
    return TurnOps(
        rank_start=schedule.rank_start.astype(np.int64),
        turn_stop=np.searchsorted(turns, schedule.rank_start[1:]).astype(np.int64),
        time=_cell_times(schedule, (PAIRED_TIMES if rule.pairs else Costs()).resolved(1), mate),
        room=(kind == OpKind.F).astype(np.int64),
        held=_of_pairs(_HELD[kind].astype(np.int64), mate),
        in_flight=_of_pairs(_IN_FLIGHT[kind].astype(np.int64), mate),
        queue=np.where(rule.pairs, 0, kind * np.int64(schedule.stages) + stage),
        first=needs[0],
        second=needs[1],
        weight=_of_pairs(_weights_of_inputs(schedule, needs[0]) + 1, mate) - 1,
        most=most,
        mate=mate,
    )


def _mates(schedule: Schedule) -> Int64:
    """[ops] row of the second op of a pair, at its first op; -1 elsewhere."""
    pair = schedule.pair
    mate = np.full(len(schedule), -1, np.int64)
    first = np.flatnonzero((pair[1:] == pair[:-1]) & (pair[1:] >= 0))
    mate[first] = first + 1
    return mate


def _turns(schedule: Schedule) -> Int64:
    """Rows other than W and the second ops of pairs, in the order of their slots."""
    mate = _mates(schedule)
    turns = schedule.kind != OpKind.W
    turns[mate[mate >= 0]] = False
    return np.flatnonzero(turns).astype(np.int64)


def _of_pairs(column: Int64, mate: Int64) -> Int64:
    """[ops] a column in which the first op of a pair has the sum over both."""
    summed = column.copy()
    first = np.flatnonzero(mate >= 0)
    summed[first] += column[mate[first]]
    return summed


def _cell_times(schedule: Schedule, costs: StageCosts, mate: Int64) -> Floats:
    """[ops] time of each op under costs of one row, at the first op of a pair that of the pair."""
    kind, first = schedule.kind, np.flatnonzero(mate >= 0)
    times: Floats = alone(costs)[kind, 0]
    for one, other in (map(OpKind.__getitem__, name) for name in PAIR_NAMES):
        pairs = first[(kind[first] == one) & (kind[mate[first]] == other)]
        times[pairs] = duration(costs, one, other, (0, 0))
    return times


def _weights_of_inputs(schedule: Schedule, needed: Int64) -> Int64:
    """[ops] row of the W with the stage and microbatch of an I; -1 for other ops. needed: [ops] the I of a W."""
    weights = np.flatnonzero(schedule.kind == OpKind.W)
    weight = np.full(len(schedule) + 1, -1, np.int64)
    weight[needed[weights]] = weights
    return weight[:-1]


def _turn_state(schedule: Schedule) -> TurnState:
    turns = _turns(schedule)
    end = np.append(np.full(len(schedule) + 1, np.inf), 0.0)
    head = np.searchsorted(turns, schedule.rank_start)[:-1].astype(np.int64)
    ran, pending, taken, held, in_flight = (np.zeros(schedule.ranks, np.int64) for _ in range(5))
    order, weights = (np.full(len(schedule), -1, np.int64) for _ in range(2))
    return TurnState(end, turns, order, weights, head, ran, pending, taken, held, in_flight, np.zeros(schedule.ranks))
