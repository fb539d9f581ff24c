"""The instructions that a pass has put in order, as kinds and what they speak of; their columns follow from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Floats, Int8, Int32, Int64, repeat
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import FIRST_OF_PAIR
from schedc.ir.program import Channel, InstructionKind, Program
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.program.queues import queued_messages
from schedc.step.program.reductions import Reductions

Values = npt.NDArray[Any]

_OfThings = tuple[Values | int, Values | int, Values | int, Values | int]
"""Values of the cells, of the sent and the received ends of messages, and of reductions; -1: they have none."""

_GATHERED = 1 << 17
"""Instructions whose values are gathered at a time, so that the wide indexes that numpy makes stay in the caches."""

_WIDE = 1 << 15
"""What does not fit into 16 bits."""


@dataclass(frozen=True, eq=False)
class Messages:
    """All messages, in their order. Columns [messages]: the cells that produce and consume, and `Channel`."""

    producer: Int32
    consumer: Int32
    channel: Int8

    def __len__(self) -> int:
        return int(self.producer.size)


@dataclass(frozen=True, eq=False)
class InstructionTable:
    """Instructions, each with the thing that it speaks of.

    Things are numbered: first the cells; then of each message its sent end and its received end; then the reductions.

    schedule, first, second: the ops, and those of each cell, as of `Dependencies`. first_cell: [P + 1] first cell of
    each rank. batch: [messages] number of the batch in which a message is posted, or -1.
    kind, thing: [n] of each instruction.
    """

    schedule: Schedule
    first: Int32
    second: Int32
    first_cell: Int64
    messages: Messages
    batch: Int32
    reductions: Reductions
    kind: Int8
    thing: Int32

    def column(self, name: str) -> Values:
        """A column of the `Program`, by its name. One that is -1 throughout takes no memory, and cannot be written."""
        of_things = _COLUMNS[name](self)
        cells, messages = self.first.size, len(self.messages)
        if all(isinstance(values, int) for values in of_things):
            return np.broadcast_to(np.array(-1, self._dtype(name)), self.thing.shape)
        by_thing = np.empty(cells + 2 * messages + self.reductions.rank.size, self._dtype(name))
        ends = by_thing[cells : cells + 2 * messages].reshape(messages, 2)
        parts = (by_thing[:cells], ends[:, 0], ends[:, 1], by_thing[cells + 2 * messages :])
        for part, values in zip(parts, of_things, strict=True):
            part[...] = values
        column = np.empty(self.thing.size, by_thing.dtype)
        for low in range(0, column.size, _GATHERED):
            rows = slice(low, low + _GATHERED)
            by_thing.take(self.thing[rows], out=column[rows], mode="clip")  # unlike "raise" it needs no copy
        if name == "batch":
            np.putmask(column, self.kind == InstructionKind.WAIT, -1)
        return column

    def _dtype(self, name: str) -> npt.DTypeLike:
        """As narrow as what the column holds."""
        limits = {"peer": self.schedule.ranks, "phase": len(self.schedule.phases), "span": len(self.schedule.spans)}
        if name in ("backward", "channel"):
            return np.int8
        return np.int16 if limits.get(name, _WIDE) < _WIDE else np.int32

    def program(self, rank_start: Int64, costs: Costs, duration: Floats | None = None) -> Program:
        """The Program; its columns, and its communicators under ``costs``, are worked out when they are first read.

        duration: [cells] from inside, where the costs have a table of cells.
        """
        schedule = self.schedule
        return Program.derived(
            self,
            partial(queued_messages, costs=costs, duration=duration),
            **schedule.shared(),
            rank_start=rank_start,
            kind=self.kind,
            source_name=schedule.source.name if schedule.source else "",
        )

    @property
    def has_pairs(self) -> bool:
        return len(self.schedule) > self.first.size

    @cached_property
    def made(self) -> Int32:
        """[messages] row of the op that makes each."""
        return self._serving(self.messages.producer)

    @cached_property
    def taken(self) -> Int32:
        """[messages] row of the op that takes each."""
        return self._serving(self.messages.consumer)

    def _serving(self, cell: Int32) -> Int32:
        """In a pair the backward makes or takes a gradient, and a forward, which is the first op, an activation."""
        if not self.has_pairs:
            return self.first[cell]
        second = self.second[cell]
        gradient = (self.messages.channel == Channel.GRADIENT) & (second >= 0) & BACKWARD[self.schedule.kind[second]]
        return np.where(gradient, second, self.first[cell])

    @property
    def rank(self) -> Int32:
        """[cells]"""
        return repeat(np.arange(self.schedule.ranks, dtype=np.int32), np.diff(self.first_cell))

    @property
    def place(self) -> Int32:
        """[cells] number of each among those of its rank."""
        first = repeat(self.first_cell[:-1].astype(np.int32), np.diff(self.first_cell))
        return np.asarray(np.arange(self.first.size, dtype=np.int32) - first)


def _of_op(name: str, table: InstructionTable) -> _OfThings:
    """The columns of the op that computes, or that produced the message."""
    values = getattr(table.schedule, name)
    made = values[table.made]
    return values[table.first], made, made, getattr(table.reductions, name, -1)


def _of_served_op(name: str, table: InstructionTable) -> _OfThings:
    """The columns of the op that an instruction serves. A received message serves the op that takes it."""
    values = getattr(table.schedule, name)
    return values[table.first], values[table.made], values[table.taken], values[table.reductions.row]


def _of_second(name: str, table: InstructionTable) -> _OfThings:
    """The columns of the second op of a pair, and the stage of the other copy of a tied weight."""
    values = getattr(table.schedule, name)
    of_cells = np.where(table.second >= 0, values[table.second], -1) if table.has_pairs else -1
    tied = name == "stage" and bool(table.schedule.tied)
    return of_cells, -1, -1, table.reductions.stage2 if tied else -1


def _pair(table: InstructionTable) -> _OfThings:
    """The numbers of the kinds of pairs."""
    kind, _, _, _ = _of_second("kind", table)
    if isinstance(kind, int):
        return -1, -1, -1, -1
    return np.where(kind >= 0, FIRST_OF_PAIR * table.schedule.kind[table.first] + kind, -1), -1, -1, -1


def _peer(table: InstructionTable) -> _OfThings:
    rank, messages = table.rank, table.messages
    return -1, rank[messages.consumer], rank[messages.producer], table.reductions.peer


def _channel(table: InstructionTable) -> _OfThings:
    return -1, table.messages.channel, table.messages.channel, -1


def _message(table: InstructionTable) -> _OfThings:
    numbers = np.arange(len(table.messages))
    return -1, numbers, numbers, table.reductions.sequence


def _batch(table: InstructionTable) -> _OfThings:
    return -1, table.batch, table.batch, -1


def _op(table: InstructionTable) -> _OfThings:
    place, messages = table.place, table.messages
    return place, place[messages.producer], place[messages.consumer], -1


_COLUMNS: dict[str, Callable[[InstructionTable], _OfThings]] = {
    "stage": partial(_of_op, "stage"),
    "microbatch": partial(_of_op, "microbatch"),
    "stage2": partial(_of_second, "stage"),
    "microbatch2": partial(_of_second, "microbatch"),
    "backward": _pair,
    "peer": _peer,
    "channel": _channel,
    "message": _message,
    "batch": _batch,
    "op": _op,
    "phase": partial(_of_served_op, "phase"),
    "span": partial(_of_served_op, "span"),
}
"""The columns of a `Program`, each by the values of the things that instructions speak of."""
