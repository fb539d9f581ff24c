"""Works: what a rank starts and later joins beside its compute, on a lane of its own; the facts of each kind.

A work is a message of a rank to itself. Its START never waits. Its JOIN waits for compute of the same rank before the
START, and for earlier works of the lane. No JOIN waits for another rank, so works add no edge between ranks, and the
proof of `schedc.passes.insert_communication` stands as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int8, Int32, Int64


class WorkLane(IntEnum):
    """What moves the bytes of a work. The works of a lane run one after the other, in the order of their STARTs."""

    D2H = 0
    """Copies from the device to host memory."""
    H2D = 1
    """Copies from host memory to the device."""


class WorkKind(IntEnum):
    """What a work does. The values are stored in int8 columns; files store names."""

    OFFLOAD = 0
    """Moves what a stage holds of a microbatch to host memory. The device has it until the JOIN."""
    FETCH = 1
    """Moves it back. The device makes room at the START."""


@dataclass(frozen=True)
class WorkFacts:
    """A row of `FACTS`."""

    name: str
    """What text forms, messages and legends call the kind."""
    lane: WorkLane
    at_start: int = 0
    """How many times the bytes of the work the device holds more from the START on."""
    at_join: int = 0
    """The same from the JOIN on."""


FACTS: dict[WorkKind, WorkFacts] = {
    WorkKind.OFFLOAD: WorkFacts("offload", WorkLane.D2H, at_join=-1),
    WorkKind.FETCH: WorkFacts("fetch", WorkLane.H2D, at_start=+1),
}
"""The facts of each kind."""

KIND_NAMES = tuple(FACTS[kind].name for kind in WorkKind)
LANE_NAMES = tuple(lane.name.lower() for lane in WorkLane)


class WorkRow(NamedTuple):
    """A row of `Works`; bytes: bytes that move, as there."""

    kind: WorkKind
    lane: WorkLane
    stage: int
    microbatch: int
    bytes: float

    def __str__(self) -> str:
        return f"{FACTS[self.kind].name} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True, eq=False)
class Works:
    """The works of a program, as columns; START and JOIN name them by their row.

    kind, lane: [works] `WorkKind` and `WorkLane`. stage, microbatch: [works] whose activations move.
    bytes: [works] bytes that move; in the unit of the plan's memory where that has no unit.
    """

    kind: Int8
    lane: Int8
    stage: Int32
    microbatch: Int32
    bytes: Floats

    @classmethod
    def of(cls, rows: Iterable[WorkRow]) -> Works:
        """The table of these rows."""
        columns = list(zip(*rows, strict=True)) or [()] * len(DTYPES)
        return cls(*(np.array(column, dtype) for column, dtype in zip(columns, DTYPES.values(), strict=True)))

    def __len__(self) -> int:
        return int(self.kind.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Works):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in DTYPES)

    __hash__ = None  # type: ignore[assignment]

    def only(self, rows: Bools | Int64) -> Works:
        """These works alone."""
        return Works(**{name: getattr(self, name)[rows] for name in DTYPES})

    def work(self, row: int) -> WorkRow:
        kind, lane, stage, microbatch, size = (getattr(self, name)[row] for name in DTYPES)
        return WorkRow(WorkKind(int(kind)), WorkLane(int(lane)), int(stage), int(microbatch), float(size))


DTYPES = {"kind": np.int8, "lane": np.int8, "stage": np.int32, "microbatch": np.int32, "bytes": np.float64}
"""The columns of `Works` and their types."""

NO_WORKS = Works.of(())
