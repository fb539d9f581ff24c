"""Finds what the messages of a lowered CSV carry, and makes the file a Program that can be simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import CompilerBug
from schedc.interchange.torch_cells import MESSAGES, TorchCellKind, TorchCells
from schedc.ir.arrays import Int64
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.program_table import flows_of
from schedc.ir.schedule import Schedule


class LoweredValues:
    """The values that one rank computes and another uses, by slot: channel, producing stage and microbatch.

    produced, consumed, sent, received: [slots] row of the cell that computes, uses, sends or receives the value; -1 if
        the file has no such cell, or no message is needed.
    sends, receives: [n] rows of message cells. slot: [rows] slot of each message cell; -1 for others, and for messages
        outside of the table.
    """

    def __init__(self, cells: TorchCells, schedule: Schedule) -> None:
        self.cells, self.place = cells, schedule.placement
        shape = (2, self.place.stages, self.place.microbatches)
        self.shape = shape
        self.produced, self.consumed = flows_of(cells, np.arange(cells.kind.size), shape[1:])
        local = (self.consumed < 0) | (cells.rank[self.produced] == cells.rank[self.consumed])
        self.produced[local] = self.consumed[local] = -1
        self.slot = np.full(cells.kind.size, -1, np.int64)
        for kind, (_, channel, step) in MESSAGES.items():
            rows = np.flatnonzero(cells.kind == kind)
            stage, microbatch = cells.stage[rows] - step, cells.microbatch[rows]
            inside = (stage >= 0) & (stage < shape[1]) & (microbatch < shape[2])
            self.slot[rows[inside]] = (channel * shape[1] + stage[inside]) * shape[2] + microbatch[inside]
        self.sends, self.receives = (
            np.flatnonzero(np.isin(cells.kind, [kind for kind in MESSAGES if MESSAGES[kind][0] is post]))
            for post in (InstructionKind.SEND, InstructionKind.RECV)
        )
        self.sent, self.received = self._rows(self.sends), self._rows(self.receives)

    def _rows(self, rows: Int64) -> Int64:
        """[slots] the first of these message cells that carries each value."""
        row_of = np.full(self.produced.size, -1, np.int64)
        inside = rows[self.slot[rows] >= 0][::-1]  # backwards, so the first of several remains
        row_of[self.slot[inside]] = inside
        return row_of

    def word(self, slot: int, receive: bool) -> str:
        """The text of the message cell that a slot needs: ``3RECV_B0``."""
        of, stage, microbatch = np.unravel_index(slot, self.shape)
        post = InstructionKind.RECV if receive else InstructionKind.SEND
        kind, step = next((kind, step) for kind, (*end, step) in MESSAGES.items() if end == [post, of])
        return f"{stage + step}{kind.name}{microbatch}"


def program_of(values: LoweredValues) -> Program:
    """The file as a Program. torch waits for a received message at the cell that uses it, and for all sent messages at
    the end of a step."""
    cells, place = values.cells, values.place
    second = np.zeros(cells.kind.size, bool)
    second[1:] = (cells.pair[1:] >= 0) & (cells.pair[1:] == cells.pair[:-1])
    compute = np.flatnonzero((cells.kind <= TorchCellKind.B) & ~second)
    pair = cells.pair[compute] >= 0
    backward = compute + pair
    number = np.cumsum((cells.kind <= TorchCellKind.B) & ~second) - 1
    number -= np.searchsorted(compute, cells.rank_start)[cells.rank]
    slots = np.flatnonzero(values.produced >= 0)
    channel, stage, microbatch = np.unravel_index(slots, values.shape)
    produced, consumed, sent, received = (
        rows[slots] for rows in (values.produced, values.consumed, values.sent, values.received)
    )
    end, message = cells.rank_start[cells.rank[sent] + 1], np.arange(slots.size)
    before_use = 4 * (consumed - second[consumed]) - 1
    both = {"channel": channel, "stage": stage, "microbatch": microbatch, "message": message}
    groups = [
        {
            "key": 4 * compute, "row": compute,
            "kind": np.where(pair, InstructionKind.CELL, cells.kind[compute]),
            "stage": cells.stage[compute], "microbatch": cells.microbatch[compute],
            "stage2": np.where(pair, cells.stage[backward], -1),
            "microbatch2": np.where(pair, cells.microbatch[backward], -1),
            "backward": np.where(pair, cells.kind[backward], -1),
            "op": number[compute],
        },
        _post(InstructionKind.SEND, 4 * sent, sent, cells.rank[received], number[produced]) | both,
        _post(InstructionKind.RECV, 4 * received, received, cells.rank[sent], number[consumed]) | both,
        # A WAIT comes just before the cell that uses the message (before the first op of a pair), or at the rank's end.
        _post(InstructionKind.WAIT, before_use, received, cells.rank[sent], number[consumed]) | both,
        _post(InstructionKind.WAIT, 4 * end - 2, sent, cells.rank[received], number[produced]) | both,
    ]  # fmt: skip
    return _assembled(values, groups, place.ranks)


def _post(kind: InstructionKind, key: Int64, row: Int64, peer: Int64, op: Int64) -> dict[str, npt.NDArray[np.int64]]:
    return {"key": key, "row": row, "kind": np.full(row.size, kind, np.int64), "peer": peer, "op": op}


def _assembled(values: LoweredValues, groups: list[dict[str, npt.NDArray[np.int64]]], ranks: int) -> Program:
    cells = values.cells

    def column(name: str) -> Int64:
        return np.concatenate([group.get(name, np.full(group["key"].size, -1, np.int64)) for group in groups])

    order = np.lexsort((column("message"), column("key")))
    rank_of = cells.rank[column("row")[order]]
    columns: dict[str, Any] = {name: column(name)[order].astype(np.int8) for name in ("kind", "backward", "channel")}
    columns |= {
        name: column(name)[order].astype(np.int32)
        for name in ("stage", "microbatch", "stage2", "microbatch2", "peer", "message", "op")
    }
    program = Program(
        name="imported", sizes={"P": ranks, "M": values.place.microbatches}, placement=values.place,
        rank_start=np.searchsorted(rank_of, np.arange(ranks + 1)).astype(np.int64),
        **columns,
        batch=np.full(order.size, -1, np.int32), phase=np.zeros(order.size, np.int32),
        span=cells.span[column("row")[order]].astype(np.int32),
        spans=cells.spans, source_name=cells.source.name, source=cells.source,
    )  # fmt: skip
    if len(computation(program)[0]) != int((cells.kind <= TorchCellKind.B).sum()):
        raise CompilerBug("lowered_values", "the program of a lowered file lost some of its cells")
    return program
