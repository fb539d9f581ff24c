"""Binds the instruction stream of one rank to its stages: rows become (handler, operands), once per input signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from schedc.cell.with_messages import POSTS, MovedMessage, batch_width, interleave_messages
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import Channel, Instruction, InstructionKind, Program
from schedc.ir.recomputed import recomputed_slots
from schedc_runtime.execute.handlers import HANDLERS, Cell, Compute, Handler, Message, Reduce, Wait, probes_of
from schedc_runtime.execute.micro_steps import CellSource, Made, expand, segmented, serial, shapes_of
from schedc_runtime.transport import Spec

if TYPE_CHECKING:
    from schedc_runtime.partition.boundary import Boundary
    from schedc_runtime.stage.stage import Stage


@dataclass(frozen=True)
class Code:
    """A rank's stream, ready to run.

    steps: handler and operands of each step. rows: the first row of the program that a step runs; widths: how many
        (more than one where a batch of messages is posted at once).
    slots, handles: how many values and messages pass through. slot_names: what each slot holds, for errors.
    inputs: slot of the first stage's arguments, per microbatch that this rank feeds into the pipeline.
    final: gradients to sum over the replicas once the stream has ended (`schedc_runtime.data_parallel`).
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
    again: frozenset[tuple[int, int]] = frozenset()
    """(stage, microbatch) of every R."""
    received: set[int] = field(default_factory=set)
    """Messages whose receive has been posted so far."""

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
        elif FACTS[kind].backward:
            read = self.slot(Channel.GRADIENT, stage + 1, microbatch) if stage < last else -1
            write = self.slot(Channel.GRADIENT, stage, microbatch) if stage > 0 else -1
        probes = probes_of([spec.dtype for spec in self.boundaries[stage + 1].tensors]) if kind is OpKind.F else ()
        again = (stage, microbatch) in self.again
        return Compute(self.stages[stage], microbatch, read, write, kind is OpKind.I, probes, again)

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

    def batch(self, batch: Sequence[Instruction]) -> tuple[Message, ...]:
        """The messages that are posted together."""
        self.received.update(x.message for x in batch if x.kind is InstructionKind.RECV)
        return tuple([self.message(x) for x in batch])

    def micro_steps(self, stream: Sequence[Instruction], position: int, cells: CellSource) -> list[Made]:
        """What an instruction on segmented stages becomes, with the messages that move into it; empty for others."""
        x = stream[position]
        if x.kind > InstructionKind.CELL:
            return []
        operands = self.operands(x)
        if not segmented(operands):
            return []
        kind, forward, backward = x.kind.name, None, operands
        if isinstance(operands, Cell):
            kind, forward, backward = f"F{OpKind(x.backward).name}", operands.forward, operands.backward
        elif x.kind is InstructionKind.F:
            forward, backward = operands, None
        program = cells(kind, *shapes_of(kind, forward, backward))
        return expand(interleave_messages(stream, position, program), kind, forward, backward)

    def operands(self, x: Instruction) -> Any:
        match x.kind:
            case InstructionKind.CELL:
                backward = self.compute(OpKind(x.backward), x.stage2, x.microbatch2)
                return Cell(self.compute(OpKind.F, x.stage, x.microbatch), backward)
            case InstructionKind.WAIT:
                slot = self.slot(x.channel, x.stage, x.microbatch) if x.message in self.received else -1
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
    cells: CellSource = serial,
) -> Code:
    """The code of ``rank``.

    stages: the stages that it holds, by number. boundaries: what crosses before each stage and after the last,
    which is what messages carry. handlers: another table puts another implementation in place. cells: the order inside
    instructions on segmented stages, which become a step for each micro-step.
    """
    binder = _Binder(program, rank, stages, boundaries, handlers, again=recomputed_slots(program))
    steps: list[tuple[Handler, Any]] = []
    rows: list[int] = []
    widths: list[int] = []
    stream = list(program.instructions(rank))
    start, position = int(program.rank_start[rank]), 0
    micro = [binder.micro_steps(stream, at, cells) for at in range(len(stream))]
    moved = {step.at for made in micro for step in made if isinstance(step, MovedMessage)}

    def add(handler: Handler, operands: Any, at: int, width: int = 1) -> None:
        steps.append((handler, operands))
        rows.append(start + at)
        widths.append(width)

    def whole(at: int) -> None:
        kind, width = stream[at].kind, batch_width(stream, at)
        add(
            handlers[kind],
            binder.batch(stream[at : at + width]) if kind in POSTS else binder.operands(stream[at]),
            at,
            width,
        )

    while position < len(stream):
        for step in micro[position]:
            if isinstance(step, MovedMessage):
                whole(step.at)
            else:
                add(*step, position)
        if not micro[position] and position not in moved:
            whole(position)
        position += batch_width(stream, position)
    inputs = {m: slot for (channel, stage, m), slot in binder.slot_of.items()
              if channel == Channel.ACTIVATION and stage == -1}  # fmt: skip
    return Code(steps, rows, widths, binder.slot_names, len(binder.handle_of), inputs)
