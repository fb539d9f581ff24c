"""Binds the instruction stream of one rank to its stages: rows become (handler, operands), once per input signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from schedc.ir.ops import OpKind
from schedc.ir.program import Channel, Instruction, InstructionKind, Program
from schedc_runtime.handlers import HANDLERS, Cell, Compute, Handler, Message, Reduce, Wait, probes_of
from schedc_runtime.transport import Spec

if TYPE_CHECKING:
    from schedc_runtime.boundary import Boundary
    from schedc_runtime.stage import Stage

_POSTS = (InstructionKind.SEND, InstructionKind.RECV)


@dataclass(frozen=True)
class Code:
    """A rank's stream, ready to run.

    steps: handler and operands of each step. rows: the first row of the program that a step runs; widths: how many
        (more than one where a batch of messages is posted at once).
    slots, handles: how many values and messages pass through. slot_names: what each slot holds, for errors.
    inputs: slot of the first stage's arguments, per microbatch that this rank feeds into the pipeline.
    final: gradients to sum over the replicas once the stream has ended (see `schedc_runtime.replicas`).
    """

    steps: list[tuple[Handler, Any]]
    rows: list[int]
    widths: list[int]
    slot_names: list[str]
    handles: int
    inputs: dict[int, int]
    final: tuple[Any, ...] = ()

    @property
    def slots(self) -> int:
        return len(self.slot_names)


@dataclass
class _Binder:
    program: Program
    rank: int
    stages: Mapping[int, Stage]
    boundaries: Sequence[Boundary]
    handlers: Mapping[InstructionKind, Handler]
    slot_of: dict[tuple[int, int, int], int] = field(default_factory=dict)
    slot_names: list[str] = field(default_factory=list)
    handle_of: dict[int, int] = field(default_factory=dict)

    @cached_property
    def reduced(self) -> dict[int, tuple[nn.Parameter, ...]]:
        """The parameters of each REDUCE, by stage: one that several stages share is summed with the last of them."""
        stream = self.program.instructions(self.rank)
        order = [x.stage for x in stream if x.kind is InstructionKind.REDUCE]
        last = {id(p): stage for stage in order for p in self.stages[stage].module.parameters()}
        return {
            stage: tuple(p for p in self.stages[stage].module.parameters() if last[id(p)] == stage) for stage in order
        }

    def slot(self, channel: int, stage: int, microbatch: int) -> int:
        """The slot of what ``stage`` produces for ``microbatch``; made on first use."""
        key = (channel, stage, microbatch)
        if key not in self.slot_of:
            self.slot_of[key] = len(self.slot_names)
            what = "activation" if channel == Channel.ACTIVATION else "gradient"
            owner = f"stage {stage}" if stage >= 0 else "the batch"
            self.slot_names.append(f"the {what} of {owner} for microbatch {microbatch}")
        return self.slot_of[key]

    def compute(self, kind: OpKind, stage: int, microbatch: int) -> Compute:
        last = self.program.stages - 1
        read = write = -1
        if kind is OpKind.F:
            read = self.slot(Channel.ACTIVATION, stage - 1, microbatch)
            write = self.slot(Channel.ACTIVATION, stage, microbatch) if stage < last else -1
        elif kind is not OpKind.W:
            read = self.slot(Channel.GRADIENT, stage + 1, microbatch) if stage < last else -1
            write = self.slot(Channel.GRADIENT, stage, microbatch) if stage > 0 else -1
        probes = probes_of([spec.dtype for spec in self.boundaries[stage + 1].tensors]) if kind is OpKind.F else ()
        return Compute(self.stages[stage], microbatch, read, write, kind is OpKind.I, probes)

    def handle(self, message: int) -> int:
        return self.handle_of.setdefault(message, len(self.handle_of))

    def message(self, x: Instruction) -> Message:
        slot = self.slot(x.channel, x.stage, x.microbatch)
        return Message(x.kind is InstructionKind.RECV, x.peer, self.specs(x), slot, self.handle(x.message))

    def specs(self, x: Instruction) -> tuple[Spec, ...]:
        """Shapes and dtypes of a message; boundary k lies before stage k."""
        if x.channel == Channel.ACTIVATION:
            carried = self.boundaries[x.stage + 1].tensors
        else:
            carried = self.boundaries[x.stage].gradients
        return tuple([(spec.shape, spec.dtype) for spec in carried])

    def operands(self, x: Instruction, received: set[int]) -> Any:
        match x.kind:
            case InstructionKind.CELL:
                backward = self.compute(OpKind(x.backward), x.stage2, x.microbatch2)
                return Cell(self.compute(OpKind.F, x.stage, x.microbatch), backward)
            case InstructionKind.WAIT:
                slot = self.slot(x.channel, x.stage, x.microbatch) if x.message in received else -1
                return Wait(self.handle(x.message), slot)
            case InstructionKind.REDUCE:
                return Reduce(x.peer, self.reduced[x.stage])
            case _:
                return self.compute(OpKind(x.kind), x.stage, x.microbatch)


def bind(
    program: Program,
    rank: int,
    stages: Mapping[int, Stage],
    boundaries: Sequence[Boundary],
    handlers: Mapping[InstructionKind, Handler] = HANDLERS,
) -> Code:
    """The code of ``rank``.

    stages: the stages that it holds, by number. boundaries: what crosses before each stage and after the last,
    which is what messages carry. handlers: another table puts another implementation in place, such as an overlapped
    cell.
    """
    binder = _Binder(program, rank, stages, boundaries, handlers)
    steps: list[tuple[Handler, Any]] = []
    rows: list[int] = []
    widths: list[int] = []
    received: set[int] = set()
    stream = list(program.instructions(rank))
    start, position = int(program.rank_start[rank]), 0
    while position < len(stream):
        x, width = stream[position], 1
        operands: Any
        if x.kind in _POSTS:
            width = _batch_width(stream, position)
            batch = stream[position : position + width]
            received.update(y.message for y in batch if y.kind is InstructionKind.RECV)
            operands = tuple([binder.message(y) for y in batch])
        else:
            operands = binder.operands(x, received)
        steps.append((handlers[x.kind], operands))
        rows.append(start + position)
        widths.append(width)
        position += width
    inputs = {m: slot for (channel, stage, m), slot in binder.slot_of.items()
              if channel == Channel.ACTIVATION and stage == -1}  # fmt: skip
    return Code(steps, rows, widths, binder.slot_names, len(binder.handle_of), inputs)


def _batch_width(stream: list[Instruction], position: int) -> int:
    """Number of neighbouring SEND and RECV, from ``position`` on, that are posted by one call."""
    end = position + 1
    batch = stream[position].batch
    while batch >= 0 and end < len(stream) and stream[end].kind in _POSTS and stream[end].batch == batch:
        end += 1
    return end - position
