"""The second IR: one instruction stream per rank, with communication and waits; what the runtime executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int8, Int32, Int64, repeat
from schedc.ir.columns import Columns
from schedc.ir.ops import FIRST_OF_PAIR, OpKind, kinds_of_pair
from schedc.ir.placement import Placement
from schedc.ir.plan import NO_PLAN, Plan
from schedc.ir.schedule import Schedule
from schedc.ir.ties import Tie
from schedc.ir.works import NO_WORKS, Works
from schedc.source import NOWHERE, Source, Span


class InstructionKind(IntEnum):
    """What one instruction does. The compute kinds have the values of `OpKind`; files store names."""

    F = OpKind.F
    I = OpKind.I  # noqa: E741
    W = OpKind.W
    B = OpKind.B
    R = OpKind.R
    CELL = len(OpKind)
    """An overlapped pair: a forward or an input gradient, and a backward or a weight gradient of another microbatch."""
    SEND = CELL + 1
    """Start sending a message; returns at once."""
    RECV = CELL + 2
    """Post the receive of a message; returns at once."""
    WAIT = CELL + 3
    """Wait until a message that this rank has posted is complete."""
    REDUCE = CELL + 4
    """Sum weight gradients with another rank: those of a stage's other copy, or of a weight that is tied to them."""
    START = CELL + 5
    """Start a work on its lane; returns at once."""
    JOIN = CELL + 6
    """Wait until a work that this rank has started is complete."""


class Channel(IntEnum):
    """What a message carries."""

    ACTIVATION = 0
    """Output of ``stage`` for ``microbatch``, to the rank of stage + 1."""
    GRADIENT = 1
    """Gradient of the input of ``stage`` for ``microbatch``, to the rank of stage - 1."""


class Instruction(NamedTuple):
    """A row of a `Program`. Fields that do not apply are -1."""

    rank: int
    kind: InstructionKind
    stage: int
    microbatch: int
    stage2: int
    microbatch2: int
    backward: int
    peer: int
    channel: int
    message: int
    batch: int
    op: int
    work: int = -1

    @property
    def kind_name(self) -> str:
        """The letters of both ops for a CELL, ``FB``; else the name of the kind."""
        if self.kind is not InstructionKind.CELL:
            return self.kind.name
        return "".join(kind.name for kind in kinds_of_pair(self.backward))

    @property
    def computes(self) -> bool:
        """Whether the instruction runs stages: an op, or the two of a CELL."""
        return self.kind <= InstructionKind.CELL

    @property
    def is_tied(self) -> bool:
        """Whether the instruction is the REDUCE of a tied weight."""
        return self.kind is InstructionKind.REDUCE and self.stage2 >= 0

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that a compute instruction runs: of a CELL the stages of both ops, in order."""
        return (self.stage, self.stage2) if self.kind is InstructionKind.CELL else (self.stage,)

    @property
    def last_slot(self) -> tuple[int, int]:
        """Stage and microbatch of a CELL's second op; of any other instruction its own."""
        if self.kind is InstructionKind.CELL:
            return self.stage2, self.microbatch2
        return self.stage, self.microbatch

    @property
    def ops(self) -> tuple[tuple[OpKind, int, int], ...]:
        """Kind, stage and microbatch of each op of a compute instruction: of a CELL two."""
        if self.kind is not InstructionKind.CELL:
            return ((OpKind(self.kind), self.stage, self.microbatch),)
        first, second = kinds_of_pair(self.backward)
        return (first, self.stage, self.microbatch), (second, self.stage2, self.microbatch2)


COLUMNS = (
    "stage", "microbatch", "stage2", "microbatch2", "backward", "peer", "channel", "message", "batch", "op", "phase",
    "span",
)  # fmt: skip
"""The columns of a `Program` without works, besides its ``kind``."""

EVERY_COLUMN = (*COLUMNS, "work")
"""The columns of any `Program` besides its ``kind``."""

INT8_COLUMNS = ("kind", "backward", "channel")
"""The columns whose values fit into 8 bits; others have 32."""


def _no_work(kind: Int8) -> Int32:
    """[n] -1 for each of n instructions; takes no memory, and cannot be written."""
    return np.broadcast_to(np.int32(-1), kind.shape)


Family = Callable[[int], "Program"]
"""family(number of microbatches) -> a program, otherwise compiled alike. Raises `DiagnosticError`."""


class Deferred(Protocol):
    """What can work out the columns of a Program, each by its name."""

    def column(self, name: str) -> npt.NDArray[Any]:
        """[n] the column of this name, for n instructions."""


@dataclass(frozen=True, eq=False, repr=False)
class Program(Columns):
    """The instruction streams of all ranks, as columns; rank r owns rows rank_start[r] ..< rank_start[r + 1].

    kind: [n] `InstructionKind`.
    stage, microbatch: [n] of a compute instruction: what it computes (for a CELL, the first op);
        of SEND, RECV and WAIT: the op that **produced** the message; of REDUCE: the stage. START and JOIN: those of
        the work, where microbatch may be -1.
    stage2, microbatch2: [n] the second op of a CELL; of the REDUCE of a tied weight: the stage of the peer's copy and
        -1; else -1.
    backward: [n] of a CELL: the number of its kind (`schedc.ir.ops.pair_number`); else -1. Where the first op is an F
        it is the kind of the second: OpKind.B, I or W.
    peer: [n] of SEND: destination rank, of RECV and WAIT: source rank (of WAIT on a sent message: its
        destination), of REDUCE: the rank with the other copy; else -1.
    channel: [n] `Channel` of SEND, RECV, WAIT; else -1.
    message: [n] number of the message of SEND, RECV, WAIT: its position in the one global order that both ends
        of every channel follow. REDUCE: its sequence number among the reductions of that pair of ranks. Else -1.
    batch: [n] neighbouring SEND and RECV with one number are posted by one call; else -1.
    phase, span: [n] indexes into ``phases`` and ``spans``; those of the op that an instruction serves.
    op: [n] position, in its rank's order of compute cells, of the cell that an instruction serves. SEND: its
        producer. RECV, and WAIT for a receive: the consumer. WAIT for a send: the producer. REDUCE: -1. START and
        JOIN: the next cell, at the end of the stream the last one.
    work: [n] of START and JOIN: the row of ``works``; else -1.

    layout, layers: where the parts of the model lie, as of a `Schedule`; what the runtime executes then.
    plan: what the plan attaches besides, as of a `Schedule`.
    tied: the stages that use the same parameters, as of a `Schedule`. segments: parts of each sequence, as there.
    works: what runs beside compute, numbered rank by rank in the order of the STARTs.
    communicators: [messages] the communicator of each message, by ascending number; empty where one has all messages.

    family: compiles the same with another number of microbatches; None for what was read from a file.

    A message never connects a rank with itself: neighbouring stages on one rank hand over locally.
    """

    name: str
    sizes: Mapping[str, int]
    placement: Placement
    rank_start: Int64
    kind: Int8
    stage: Int32
    microbatch: Int32
    stage2: Int32
    microbatch2: Int32
    backward: Int8
    peer: Int32
    channel: Int8
    message: Int32
    batch: Int32
    op: Int32
    phase: Int32
    span: Int32
    phases: tuple[str, ...] = ("",)
    spans: tuple[Span, ...] = (NOWHERE,)
    doc: str = ""
    source_name: str = ""
    layout: str = ""
    layers: int = 0
    plan: Plan = NO_PLAN
    tied: tuple[Tie, ...] = ()
    segments: int = 1
    works: Works = field(default_factory=lambda: NO_WORKS)
    communicators: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    source: Source | None = field(default=None, compare=False, repr=False)
    family: Family | None = field(default=None, compare=False, repr=False)
    work: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not len(self.works):
            vars(self)["work"] = _no_work(self.kind)

    @classmethod
    def derived(cls, columns: Deferred, choose: Callable[[Program], object], **fields: Any) -> Program:
        """A Program whose columns besides ``kind``, and whose communicators, are worked out when they are first read.

        The value equals a Program with all columns given: compiling needs few, and at ten million ops all of
        them together are larger than everything else. choose: says its communicators (`settle`).
        """
        program = object.__new__(cls)
        vars(program).update(
            {"works": NO_WORKS, "work": _no_work(fields["kind"])}, _deferred=columns, _choose=choose, **fields
        )
        return program

    def settle(self, communicators: Int32) -> None:
        """Say the communicators, [messages], that were to be worked out; nothing changes where they are known."""
        if vars(self).pop("_choose", None):
            vars(self)["communicators"] = communicators

    if not TYPE_CHECKING:  # other names than those of fields stay unknown

        def __getattr__(self, name: str) -> Any:
            """A column that is read for the first time; only asked for what is not there."""
            if name == "communicators" and "_choose" in vars(self):
                vars(self)["_choose"](self)
                return vars(self)[name]
            if name not in COLUMNS or "_deferred" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            columns = vars(self)
            columns[name] = columns["_deferred"].column(name)
            if columns.keys() >= set(COLUMNS):
                del columns["_deferred"]  # all are there
            return columns[name]

    def instruction(self, row: int) -> Instruction:
        values = (int(getattr(self, name)[row]) for name in Instruction._fields[2:])
        return Instruction(int(self.rank[row]), InstructionKind(int(self.kind[row])), *values)

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """The instruction stream of one rank."""
        return (self.instruction(row) for row in range(int(self.rank_start[rank]), int(self.rank_start[rank + 1])))

    def where(self, row: int) -> str:
        """Source place of an instruction: ``dualpipev.sched:14:5 (phase steady)``, as far as it is known."""
        span, phase = self.spans[self.span[row]], self.phases[self.phase[row]]
        place = f"{self.source_name or self.name}:{span}" if span != NOWHERE else (self.source_name or self.name)
        return f"{place} (phase {phase})" if phase else place


def computation(program: Program) -> tuple[Schedule, Int64]:
    """What a program computes, as a Schedule, and the instruction of each of its ops: [ops] rows of the program.

    The two ops of a CELL share its phase and its span.
    """
    compute = np.flatnonzero(program.kind <= InstructionKind.CELL)
    cell = program.kind[compute] == InstructionKind.CELL
    row = repeat(compute, 1 + cell)
    second = np.zeros(row.size, bool)
    second[1:] = row[1:] == row[:-1]
    first_kind = np.where(cell, program.backward[compute] // FIRST_OF_PAIR, program.kind[compute]).astype(np.int8)
    schedule = Schedule(
        **program.shared(),
        rank_start=np.searchsorted(row, program.rank_start),
        kind=np.where(second, program.backward[row] % FIRST_OF_PAIR, repeat(first_kind, 1 + cell)),
        stage=np.where(second, program.stage2[row], program.stage[row]),
        microbatch=np.where(second, program.microbatch2[row], program.microbatch[row]),
        pair=np.where(repeat(cell, 1 + cell), repeat(np.cumsum(cell) - 1, 1 + cell), -1).astype(np.int32),
        phase=program.phase[row],
        span=program.span[row],
    )
    return schedule, row
