"""The instructions that a pass has put in order, as kinds and what they speak of; their columns follow from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.program import Channel, InstructionKind, Program
from schedc.ir.schedule import Int8, Int32, Int64, Schedule
from schedc.passes.reductions import Reductions

Values = npt.NDArray[Any]


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
        """A column of the `Program`, by its name."""
        of_things: Values = np.concatenate(_THINGS[name](self))
        values = of_things[self.thing]
        if name == "batch":
            values[self.kind == InstructionKind.WAIT] = -1
        return values

    def program(self, rank_start: Int64) -> Program:
        """The Program; its columns are worked out when they are first read."""
        schedule = self.schedule
        return Program.derived(
            self,
            name=schedule.name,
            sizes=dict(schedule.sizes),
            placement=schedule.placement,
            rank_start=rank_start,
            kind=self.kind,
            phases=schedule.phases,
            spans=schedule.spans,
            doc=schedule.doc,
            layout=schedule.layout,
            layers=schedule.layers,
            source_name=schedule.source.name if schedule.source else "",
            source=schedule.source,
        )

    def serving(self, cell: Int32) -> Int32:
        """[messages] row of the op that makes or takes each: in a pair, the forward an activation, the backward a
        gradient."""
        if not self.has_pairs:
            return self.first[cell]
        second = self.second[cell]
        backward = (self.messages.channel == Channel.GRADIENT) & (second >= 0)
        return np.where(backward, second, self.first[cell])

    @property
    def has_pairs(self) -> bool:
        return len(self.schedule) > self.first.size

    def both(self, sent: Values, received: Values) -> Values:
        """Values of the two ends of each message, as things are numbered."""
        ends = np.empty((len(self.messages), 2), sent.dtype)
        ends[:, 0], ends[:, 1] = sent, received
        return ends.ravel()

    def none(self, count: int, dtype: npt.DTypeLike = np.int32) -> Values:
        return np.full(count, -1, dtype)

    def rank_of(self, cell: Int32) -> Int32:
        return self.schedule.rank[self.first[cell]]

    def within_rank(self, cell: Int32) -> Int32:
        """Number of a cell among those of its rank."""
        return np.asarray(cell - self.first_cell.astype(np.int32)[self.rank_of(cell)], np.int32)


def _of_op(name: str, of_reductions: bool) -> Callable[[InstructionTable], list[Values]]:
    """A column of the schedule: of the op that computes, or makes the message; a reduction has its own, or none."""

    def column(table: InstructionTable) -> list[Values]:
        values = getattr(table.schedule, name)
        made = values[table.serving(table.messages.producer)]
        reductions = table.reductions
        last = getattr(reductions, name).astype(np.int32) if of_reductions else table.none(reductions.rank.size)
        return [values[table.first], table.both(made, made), last]

    return column


def _of_served_op(name: str) -> Callable[[InstructionTable], list[Values]]:
    """Where the op that an instruction serves comes from: a received message serves its consumer."""

    def column(table: InstructionTable) -> list[Values]:
        values, messages = getattr(table.schedule, name), table.messages
        sent, received = values[table.serving(messages.producer)], values[table.serving(messages.consumer)]
        return [values[table.first], table.both(sent, received), values[table.reductions.row]]

    return column


def _of_second(name: str) -> Callable[[InstructionTable], list[Values]]:
    """A column of the backwards of pairs."""

    def column(table: InstructionTable) -> list[Values]:
        values = getattr(table.schedule, name)
        cells, others = table.first.size, 2 * len(table.messages) + table.reductions.rank.size
        if not table.has_pairs:
            return [table.none(cells + others, values.dtype)]
        of_cells = np.where(table.second >= 0, values[table.second], values.dtype.type(-1))
        return [of_cells, table.none(others, values.dtype)]

    return column


def _peer(table: InstructionTable) -> list[Values]:
    messages = table.messages
    ends = table.both(table.rank_of(messages.consumer), table.rank_of(messages.producer))
    return [table.none(table.first.size), ends, table.reductions.peer.astype(np.int32)]


def _channel(table: InstructionTable) -> list[Values]:
    messages = table.messages
    ends = table.both(messages.channel, messages.channel)
    return [table.none(table.first.size, np.int8), ends, table.none(table.reductions.rank.size, np.int8)]


def _message(table: InstructionTable) -> list[Values]:
    numbers = np.repeat(np.arange(len(table.messages), dtype=np.int32), 2)
    return [table.none(table.first.size), numbers, table.reductions.sequence.astype(np.int32)]


def _batch(table: InstructionTable) -> list[Values]:
    return [table.none(table.first.size), np.repeat(table.batch, 2), table.none(table.reductions.rank.size)]


def _op(table: InstructionTable) -> list[Values]:
    cells, messages = np.arange(table.first.size, dtype=np.int32), table.messages
    place = table.within_rank(cells)
    ends = table.both(place[messages.producer], place[messages.consumer])
    return [place, ends, table.none(table.reductions.rank.size)]


_THINGS: dict[str, Callable[[InstructionTable], list[Values]]] = {
    "stage": _of_op("stage", of_reductions=True),
    "microbatch": _of_op("microbatch", of_reductions=False),
    "stage2": _of_second("stage"),
    "microbatch2": _of_second("microbatch"),
    "backward": _of_second("kind"),
    "peer": _peer,
    "channel": _channel,
    "message": _message,
    "batch": _batch,
    "op": _op,
    "phase": _of_served_op("phase"),
    "span": _of_served_op("span"),
}
"""The columns of a `Program`, each by the values of the things that instructions speak of, in their order."""
