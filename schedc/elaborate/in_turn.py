"""Orders the ops of a `timed` block with `fill`: gives its loop arrays, or lists until compiling it is worth it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path

import numpy as np

from schedc.elaborate import turn_loops
from schedc.elaborate.clock import OpValues
from schedc.elaborate.rules import InTurn
from schedc.elaborate.simulated_order import SimulatedOrder
from schedc.elaborate.turn_loops import TurnOps, TurnState
from schedc.ir.arrays import Int64
from schedc.ir.compiled import IMPORT_SECONDS, called_from_loops, compile_seconds, jit
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.op_times import OpTimes

_COMPILE_SECONDS = 3.0
"""What compiling the loop costs, once on a machine."""

_HELD = np.array([(kind is OpKind.F) - (kind in (OpKind.W, OpKind.B)) for kind in OpKind])
_IN_FLIGHT = np.array([(kind is OpKind.F) - (kind in (OpKind.I, OpKind.B)) for kind in OpKind])
"""[kinds] by how many an op changes the activations that its rank holds, and the microbatches in flight."""

Loop = Callable[[TurnOps, TurnState], None]

_interpreted_seconds = [0.0]


def run_turns(schedule: Schedule, rule: InTurn) -> SimulatedOrder:
    """The order by ``rule`` of a schedule whose ops are all of the `timed` block. Ops take their unit costs.

    The loop is compiled once its interpreted runs took as long as loading it. Both ways give the same order.
    """
    ops, state = _turn_ops(schedule, rule), _turn_state(schedule)
    if (loop := _compiled()) is not None:
        loop(ops, state)
        return _as_order(schedule, state)
    began = time.process_time()
    lists = TurnState(*(column.tolist() for column in state))
    turn_loops.run_in_turn(TurnOps(*(column.tolist() for column in ops)), lists)
    _interpreted_seconds[0] += time.process_time() - began
    return _as_order(schedule, TurnState(*(np.array(column) for column in lists)))


def _compiled() -> Loop | None:
    if _interpreted_seconds[0] < IMPORT_SECONDS or _interpreted_seconds[0] < IMPORT_SECONDS + _left_to_compile():
        return None
    return load()


@cache
def _left_to_compile() -> float:
    return compile_seconds(Path(turn_loops.__file__), _COMPILE_SECONDS)


@cache
def load() -> Loop | None:
    """The compiled loop, which is used from now on; None without numba."""
    if (compiled := jit()) is None:
        return None
    called_from_loops(turn_loops.may_run)
    _interpreted_seconds[0] = inf
    loop: Loop = compiled(turn_loops.run_in_turn)
    return loop


def _turn_ops(schedule: Schedule, rule: InTurn) -> TurnOps:
    kind, stage = schedule.kind, schedule.stage.astype(np.int64)
    values, turns = OpValues.of(schedule), np.flatnonzero(kind != OpKind.W)
    most = np.full(schedule.ranks, np.inf) if rule.most is None else np.array(rule.most, np.float64)
    times = np.array(OpTimes.of(Costs(), 1).alone)[:, 0]
    return TurnOps(
        rank_start=schedule.rank_start.astype(np.int64),
        turn_stop=np.searchsorted(turns, schedule.rank_start[1:]).astype(np.int64),
        time=times[kind].astype(np.float64),
        room=(kind == OpKind.F).astype(np.int64),
        held=_HELD[kind].astype(np.int64),
        in_flight=_IN_FLIGHT[kind].astype(np.int64),
        queue=kind * np.int64(schedule.stages) + stage,
        first=values.first.astype(np.int64),
        second=values.second.astype(np.int64),
        output=values.output.astype(np.int64),
        mark=values.mark.astype(np.int64),
        weight=_weights_of_inputs(schedule),
        most=most,
    )


def _weights_of_inputs(schedule: Schedule) -> Int64:
    """[ops] row of the W with the stage and microbatch of an I; -1 for other ops."""
    slot = schedule.stage.astype(np.int64) * schedule.microbatches + schedule.microbatch
    weights, inputs = np.flatnonzero(schedule.kind == OpKind.W), np.flatnonzero(schedule.kind == OpKind.I)
    table = np.full(schedule.stages * schedule.microbatches, -1, np.int64)
    table[slot[weights]] = weights
    weight = np.full(len(schedule), -1, np.int64)
    weight[inputs] = table[slot[inputs]]
    return weight


def _turn_state(schedule: Schedule) -> TurnState:
    turns = np.flatnonzero(schedule.kind != OpKind.W).astype(np.int64)
    there = np.full(4 * schedule.stages * schedule.microbatches + 2, np.inf)
    there[-2] = 0.0
    head = np.searchsorted(turns, schedule.rank_start)[:-1].astype(np.int64)
    ran, pending, taken, held, in_flight = (np.zeros(schedule.ranks, np.int64) for _ in range(5))
    order, weights = (np.full(len(schedule), -1, np.int64) for _ in range(2))
    begin, free = (np.zeros(schedule.ranks) for _ in range(2))
    return TurnState(there, turns, order, weights, head, ran, pending, taken, held, in_flight, begin, free)


def _as_order(schedule: Schedule, state: TurnState) -> SimulatedOrder:
    rows = state.order[state.order >= 0]
    span, makespan = (state.free - state.begin).max(initial=0.0), state.free.max(initial=0.0)
    alone = np.zeros(rows.size, bool)
    return SimulatedOrder(rows, alone, float(makespan), float(span), rows.size == len(schedule))
