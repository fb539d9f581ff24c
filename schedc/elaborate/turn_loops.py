"""The loop that fills `timed` orders, over arrays where numba compiles it, and over lists where it is interpreted."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple


class TurnOps(NamedTuple):
    """What does not change while ranks run the ops of a `timed` block with `fill`.

    rank_start: [P + 1] rows of each rank. turn_stop: [P] place in `TurnState.turn` behind its ops.
    time: [ops] duration, above zero. room: [ops] 1 for a forward, else 0. held, in_flight: [ops] by how many an op
    changes the activations of its rank, and the microbatches in flight. queue: [ops] number of its kind and stage.
    first, second: [ops] places of the values that it needs. output, mark: [ops] places of those that it sets.
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
    output: Any
    mark: Any
    weight: Any
    most: Any


class TurnState(NamedTuple):
    """What changes. The loop fills ``order``, ``ran``, ``begin`` and ``free``.

    there: when each value is there; inf before. turn: rows other than W, in the order of their slots. order: [ops] rows
    of each rank in the order of their start, from its first row on. weights: [ops] W whose I has started, likewise.
    head: [P] place of the next op in ``turn``. ran, pending, taken: [P] ops that started, W in ``weights``, and those
    of them that started. holds, flying: [P] activations held, and
    microbatches in flight. begin: [P] start of the first op. free: [P] end of the last one.
    """

    there: Any
    turn: Any
    order: Any
    weights: Any
    head: Any
    ran: Any
    pending: Any
    taken: Any
    holds: Any
    flying: Any
    begin: Any
    free: Any


def run_in_turn(ops: TurnOps, state: TurnState) -> None:
    """Runs all ranks by the rule `InTurn`, without latency of messages, until nothing can start.

    A rank can start an op only when one ends, its own or another one: these times are visited, each once.
    """
    rank_start, turn_stop, time, room, held, in_flight, queue, first, second, output, mark, weight, most = ops
    there, turn, order, weights, head, ran, pending, taken, holds, flying, begin, free = state
    now = 0.0
    while now < inf:
        later = inf
        for rank in range(len(free)):
            place, stop, full, row = head[rank], turn_stop[rank], holds[rank] >= most[rank], -1
            if free[rank] > now:
                later = min(later, free[rank])
                continue
            if place < stop and may_run(turn[place], full, now, room, there, first, second):
                row = turn[place]
                head[rank] += 1
            elif taken[rank] < pending[rank]:
                row = weights[rank_start[rank] + taken[rank]]
                taken[rank] += 1
            elif place + 1 < stop and queue[turn[place]] != queue[turn[place + 1]]:
                full = full or flying[rank] + room[turn[place]] >= most[rank]
                if may_run(turn[place + 1], full, now, room, there, first, second):
                    row = turn[place + 1]
                    turn[place + 1] = turn[place]
                    head[rank] += 1
            if row < 0:
                continue
            if ran[rank] == 0:
                begin[rank] = now
            order[rank_start[rank] + ran[rank]] = row
            ran[rank] += 1
            if weight[row] >= 0:
                weights[rank_start[rank] + pending[rank]] = weight[row]
                pending[rank] += 1
            holds[rank] += held[row]
            flying[rank] += in_flight[row]
            free[rank] = now + time[row]
            there[output[row]] = free[rank]
            there[mark[row]] = 0.0
            later = min(later, free[rank])
        now = later


def may_run(row: int, full: bool, now: float, room: Any, there: Any, first: Any, second: Any) -> bool:
    """Whether the inputs of an op are there. full: whether the rank has no room for a forward."""
    return not (full and room[row]) and there[first[row]] <= now and there[second[row]] <= now
