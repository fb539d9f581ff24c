"""Works: what a rank starts and later joins beside its compute, on a lane of its own; the facts of each kind.

A work is a message of a rank to itself. Its START never waits. Its JOIN waits for compute of the same rank before the
START, and for earlier works of the lane. So works add no edge between the ranks of a pipeline, and the proof of
`schedc.step.program.insert_communication` stands as it is. In a work among replicas, processes of the same rank take
part. They run the same program, and start and join the same works in one order (`schedc.cell.collectives`).
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
    DP = 2
    """Collectives among the replicas of a rank."""


class WorkGroup(IntEnum):
    """Which processes take part in a work. The values are stored in int8 columns; files store names."""

    LOCAL = -1
    """The process alone."""
    REPLICAS = 0
    """All replicas of the rank."""
    SAME_EXPERTS = 1
    """The replicas that hold the same experts."""


class WorkKind(IntEnum):
    """What a work does. The values are stored in int8 columns; files store names."""

    OFFLOAD = 0
    """Moves what a stage holds of a microbatch to host memory. The device has it until the JOIN."""
    FETCH = 1
    """Moves it back. The device makes room at the START."""
    GATHER = 2
    """Makes the sharded parameters of a stage whole. The device makes room at the START."""
    DROP = 3
    """Frees the whole parameters; every replica keeps its shard. A drop takes no time on its lane."""
    SCATTER = 4
    """First half of a gradient sum: every replica gets the sum of its part. The device holds buckets from the START."""
    SPREAD = 5
    """Second half: every replica gets the whole sum, but for sharded parameters. The JOIN frees the buckets."""
    SNAPSHOT = 6
    """Copies the state of a stage to host memory."""


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
    at_start_on_host: int = 0
    """How many times these bytes the host holds more from the START on."""
    at_join_on_host: int = 0
    """The same from the JOIN on."""
    groups: tuple[WorkGroup, ...] = (WorkGroup.LOCAL,)
    """Who may take part."""
    of_stage: bool = False
    """Whether the work concerns a stage and no microbatch, which is then -1."""


_AMONG = (WorkGroup.REPLICAS, WorkGroup.SAME_EXPERTS)

FACTS: dict[WorkKind, WorkFacts] = {
    WorkKind.OFFLOAD: WorkFacts("offload", WorkLane.D2H, at_join=-1, at_start_on_host=+1),
    WorkKind.FETCH: WorkFacts("fetch", WorkLane.H2D, at_start=+1, at_join_on_host=-1),
    WorkKind.GATHER: WorkFacts("gather", WorkLane.DP, at_start=+1, groups=_AMONG, of_stage=True),
    WorkKind.DROP: WorkFacts("drop", WorkLane.DP, at_join=-1, of_stage=True),
    WorkKind.SCATTER: WorkFacts("scatter", WorkLane.DP, at_start=+1, groups=_AMONG, of_stage=True),
    WorkKind.SPREAD: WorkFacts("spread", WorkLane.DP, at_join=-1, groups=_AMONG, of_stage=True),
    WorkKind.SNAPSHOT: WorkFacts("snapshot", WorkLane.D2H, at_start_on_host=+1, of_stage=True),
}
"""The facts of each kind."""

KIND_NAMES = tuple(FACTS[kind].name for kind in WorkKind)
LANE_NAMES = tuple(lane.name.lower() for lane in WorkLane)
GROUP_NAMES = tuple(group.name.lower() for group in WorkGroup)
"""By the value less that of the first, `WorkGroup.LOCAL`."""


class WorkRow(NamedTuple):
    """A row of `Works`; bytes: bytes that move, as there."""

    kind: WorkKind
    lane: WorkLane
    stage: int
    microbatch: int
    bytes: float
    group: WorkGroup = WorkGroup.LOCAL

    def __str__(self) -> str:
        if self.microbatch < 0:
            among = "" if self.group is WorkGroup.LOCAL else f", among {self.group.name.lower()}"
            return f"{FACTS[self.kind].name} of stage {self.stage}{among}"
        return f"{FACTS[self.kind].name} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True, eq=False)
class Works:
    """The works of a program, as columns; START and JOIN name them by their row.

    kind, lane: [works] `WorkKind` and `WorkLane`. stage, microbatch: [works] whose activations move; microbatch
    is -1 where the work concerns the whole stage. bytes: [works] bytes that move. Where replicas take part they
    are those of whole parameters or gradients, and each of R replicas sends (R - 1) / R of them. They are in the unit
    of the plan's memory where that has no unit. group: [works] `WorkGroup`.

    The gradients of a stage and group are summed by one SCATTER and one SPREAD. Where tied weights wait for their
    REDUCE, another pair sums them behind it.
    """

    kind: Int8
    lane: Int8
    stage: Int32
    microbatch: Int32
    bytes: Floats
    group: Int8

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

    @property
    def queue(self) -> Int8:
        """[works] the lane that each waits for; behind the last lane for a DROP, which waits for nothing."""
        return np.where(self.kind == WorkKind.DROP, len(WorkLane), self.lane).astype(np.int8)

    def only(self, rows: Bools | Int64) -> Works:
        """These works alone."""
        return Works(**{name: getattr(self, name)[rows] for name in DTYPES})

    def work(self, row: int) -> WorkRow:
        kind, lane, stage, microbatch, size, group = (getattr(self, name)[row] for name in DTYPES)
        enums = WorkKind(int(kind)), WorkLane(int(lane))
        return WorkRow(*enums, int(stage), int(microbatch), float(size), WorkGroup(int(group)))


DTYPES = {
    "kind": np.int8,
    "lane": np.int8,
    "stage": np.int32,
    "microbatch": np.int32,
    "bytes": np.float64,
    "group": np.int8,
}
"""The columns of `Works` and their types."""

NO_WORKS = Works.of(())
