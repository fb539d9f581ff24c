"""Instructions while a pass collects them, group by group, and the Program that they make in the end."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from schedc.ir.program import Program
from schedc.ir.schedule import Int8, Int32, Int64, Schedule

Number = TypeVar("Number", np.int8, np.int32)

Columns = dict[str, npt.NDArray[Any] | int]
"""Values of one group of instructions, by the names of `Program`'s columns (``row``: the op that gives phase and span;
``op``: the cell, over all ranks). A column left out is -1."""

POST, WAIT_SEND, WAIT_RECV, CELL = range(4)
"""Order of what stands in one gap, which is the place before a cell; the cell itself closes the gap."""


class InstructionTable:
    """Instructions while they are collected, group by group."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.keys: list[Int64] = []
        self.groups: list[Columns] = []

    def add(self, within: int, gap: Int64, rank_order: Int64, columns: Columns) -> None:
        """Instructions that stand at place ``within`` of each ``gap``, several of them in ``rank_order``."""
        self.keys.append((gap * (CELL + 1) + within) * (2**31) + rank_order)
        self.groups.append(columns)

    def _column(self, name: str, dtype: type[Number]) -> npt.NDArray[Number]:
        out = np.full(sum(key.size for key in self.keys), -1, dtype)
        start = 0
        for key, columns in zip(self.keys, self.groups, strict=True):
            if name in columns:
                out[start : start + key.size] = columns[name]
            start += key.size
        return out

    def program(self, first_cell: Int64) -> Program:
        """The streams. first_cell: [P + 1] first cell of each rank; the last gap of rank r is first_cell[r + 1] + r."""
        schedule = self.schedule
        key = np.concatenate(self.keys)
        by_place = np.argsort(key, kind="stable")  # fast: a few ascending runs
        gap = key[by_place] // (2**31 * (CELL + 1))
        ends = first_cell[1:] + np.arange(schedule.ranks)
        row = self._column("row", np.int32)[by_place]
        op = self._column("op", np.int32)[by_place]
        rank_start = np.concatenate([[0], np.searchsorted(gap, ends, side="right")])
        own_first = np.repeat(first_cell[:-1].astype(np.int32), np.diff(rank_start))

        def int8(name: str) -> Int8:
            return self._column(name, np.int8)[by_place]

        def int32(name: str) -> Int32:
            return self._column(name, np.int32)[by_place]

        return Program(
            name=schedule.name,
            sizes=dict(schedule.sizes),
            placement=schedule.placement,
            rank_start=rank_start,
            kind=int8("kind"),
            stage=int32("stage"),
            microbatch=int32("microbatch"),
            stage2=int32("stage2"),
            microbatch2=int32("microbatch2"),
            backward=int8("backward"),
            peer=int32("peer"),
            channel=int8("channel"),
            message=int32("message"),
            batch=int32("batch"),
            op=np.where(op >= 0, op - own_first, np.int32(-1)),
            phase=schedule.phase[row],
            span=schedule.span[row],
            phases=schedule.phases,
            spans=schedule.spans,
            doc=schedule.doc,
            layout=schedule.layout,
            layers=schedule.layers,
            source_name=schedule.source.name if schedule.source else "",
            source=schedule.source,
        )
