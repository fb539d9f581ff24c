"""Orders the ops of a `timed` block with `fill`, by one loop: over arrays where numba compiles it, else over lists."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.compiled import IMPORT_SECONDS, called_from_loops, compile_seconds, jit
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.step.choose import ChosenOrder
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import needs_of
from schedc.step.durations import alone
from schedc.step.rules import InTurn

_COMPILE_SECONDS = 3.0
"""What compiling the loop costs, once on a machine."""

_HELD = np.array([(kind is OpKind.F) - (kind in (OpKind.W, OpKind.B)) for kind in OpKind])
_IN_FLIGHT = np.array([(kind is OpKind.F) - (kind in (OpKind.I, OpKind.B)) for kind in OpKind])
"""[kinds] by how many an op changes the activations that its rank holds, and the microbatches in flight."""


class TurnOps(NamedTuple):
    """What does not change while ranks run the ops of a `timed` block with `fill`.

    rank_start: [P + 1] rows of each rank. turn_stop: [P] place in `TurnState.turn` behind its ops.
    time: [ops] duration, above zero. room: [ops] 1 for a forward, else 0. held, in_flight: [ops] by how many an op
    changes the activations of its rank, and the microbatches in flight. queue: [ops] number of its kind and stage.
    first, second: [ops] the ops that it needs, as indices of `TurnState.end`.
    weight: [ops] row of the W that follows an I, else -1. most: [P] activations for which a rank has room.
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


class TurnState(NamedTuple):
    """What changes. The loop fills ``order`` and ``ran``.

    end: [ops + 2] when each op ends; inf before its start. Behind the ops stand one that never ends and one that ended
    at 0. turn: rows other than W, in the order of their slots. order: [ops] rows of each rank in the order of their
    start, from its first row on. weights: [ops] W whose I has started, likewise.
    head: [P] place of the next op in ``turn``. ran, pending, taken: [P] ops that started, W in ``weights``, and those
    of them that started. holds, flying: [P] activations held, and microbatches in flight. free: [P] end of the last op.
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
    rank_start, turn_stop, time, room, held, in_flight, queue, first, second, weight, most = ops
    end, turn, order, weights, head, ran, pending, taken, holds, flying, free = state
    now = 0.0
    while now < inf:
        later = inf
        for rank in range(len(free)):
            place, stop, full, row = head[rank], turn_stop[rank], holds[rank] >= most[rank], -1
            if free[rank] > now:
                later = min(later, free[rank])
                continue
            if place < stop and may_run(turn[place], full, now, room, end, first, second):
                row = turn[place]
                head[rank] += 1
            elif taken[rank] < pending[rank]:
                row = weights[rank_start[rank] + taken[rank]]
                taken[rank] += 1
            elif place + 1 < stop and queue[turn[place]] != queue[turn[place + 1]]:
                full = full or flying[rank] + room[turn[place]] >= most[rank]
                if may_run(turn[place + 1], full, now, room, end, first, second):
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
            later = min(later, free[rank])
        now = later


def may_run(row: int, full: bool, now: float, room: Any, end: Any, first: Any, second: Any) -> bool:
    """Whether the ops that an op needs have ended. full: whether the rank has no room for a forward."""
    return not (full and room[row]) and end[first[row]] <= now and end[second[row]] <= now


Loop = Callable[[TurnOps, TurnState], None]

_interpreted_seconds = [0.0]


def run_turns(schedule: Schedule, rule: InTurn) -> ChosenOrder:
    """The order by ``rule`` of a schedule whose ops are all of the `timed` block. Ops take their unit costs.

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
    return ChosenOrder(rows, np.zeros(rows.size, bool))


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
    turns, needs = np.flatnonzero(kind != OpKind.W), needs_of(schedule)
    most = np.full(schedule.ranks, np.inf) if rule.most is None else np.array(rule.most, np.float64)
    return TurnOps(
        rank_start=schedule.rank_start.astype(np.int64),
        turn_stop=np.searchsorted(turns, schedule.rank_start[1:]).astype(np.int64),
        time=alone(Costs().resolved(1))[kind, 0],
        room=(kind == OpKind.F).astype(np.int64),
        held=_HELD[kind].astype(np.int64),
        in_flight=_IN_FLIGHT[kind].astype(np.int64),
        queue=kind * np.int64(schedule.stages) + stage,
        first=needs[0],
        second=needs[1],
        weight=_weights_of_inputs(schedule, needs[0]),
        most=most,
    )


def _weights_of_inputs(schedule: Schedule, needed: Int64) -> Int64:
    """[ops] row of the W with the stage and microbatch of an I; -1 for other ops. needed: [ops] the I of a W."""
    weights = np.flatnonzero(schedule.kind == OpKind.W)
    weight = np.full(len(schedule) + 1, -1, np.int64)
    weight[needed[weights]] = weights
    return weight[:-1]


def _turn_state(schedule: Schedule) -> TurnState:
    turns = np.flatnonzero(schedule.kind != OpKind.W).astype(np.int64)
    end = np.append(np.full(len(schedule) + 1, np.inf), 0.0)
    head = np.searchsorted(turns, schedule.rank_start)[:-1].astype(np.int64)
    ran, pending, taken, held, in_flight = (np.zeros(schedule.ranks, np.int64) for _ in range(5))
    order, weights = (np.full(len(schedule), -1, np.int64) for _ in range(2))
    return TurnState(end, turns, order, weights, head, ran, pending, taken, held, in_flight, np.zeros(schedule.ranks))
