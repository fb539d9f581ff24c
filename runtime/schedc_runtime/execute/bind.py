"""Binds the instruction stream of one rank to its stages: rows become `Code`. Shapes of messages may change later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import nn

from schedc.cell.serial import serial
from schedc.cell.with_messages import POSTS, MovedMessage, batch_width, interleave_messages
from schedc.ir.communicators import sends_of
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import Channel, Instruction, InstructionKind, Program
from schedc.ir.recomputed import recomputed_slots
from schedc.ir.ties import copies_of, exchanges_of
from schedc.ir.works import FACTS as WORK_FACTS
from schedc.ir.works import WorkKind
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.code import BoundStep, Call, Code, Handler
from schedc_runtime.execute.handlers import HANDLERS
from schedc_runtime.execute.micro_steps import CellSource, expand, label_of, shapes_of
from schedc_runtime.execute.operands import (
    ComputeOperands,
    ComputeStage,
    MessageOperands,
    PairOperands,
    ReduceOperands,
    ReplicaKey,
    ReplicatedStage,
    WaitOperands,
    WorkOperands,
    message_forms,
    probes_of,
    replica_keys,
)
from schedc_runtime.execute.shapes import in_shapes
from schedc_runtime.execute.tied_sums import TiedOperands
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.partition.shared import SharedParameter


def bind(
    program: Program,
    rank: int,
    stages: Mapping[int, ComputeStage],
    boundaries: Sequence[Boundary],
    handlers: Mapping[InstructionKind, Handler] = HANDLERS,
    cells: CellSource = serial,
    tied: Sequence[SharedParameter] = (),
    replicas: Mapping[ReplicaKey, ReplicatedStage] = MappingProxyType({}),
    by_microbatch: bool = False,
) -> Code:
    """The code of ``rank``.

    stages: of the rank, by index.
    boundaries: [stages + 1] what crosses before each stage and after the last, which messages carry.
    handlers: a table with other functions puts another implementation in place.
    cells: the order inside instructions on segmented stages, which become one step per micro-step.
    tied: the parameters of the program's ties.
    replicas: what works among replicas run on.
    by_microbatch: whether microbatches may have several shapes. Messages then have forms of their own by microbatch,
    and each call runs the code of its microbatch's shape (`in_shapes`).
    """
    stream, recomputed, forms = list(program.instructions(rank)), recomputed_slots(program), message_forms(boundaries)
    of_one = len(forms) if by_microbatch else 0
    binder = _Binder(program, rank, stream, stages, boundaries, handlers, recomputed, tied, replicas, of_one)
    steps = binder.steps(cells)
    if by_microbatch:
        steps, forms = in_shapes(steps), forms * program.microbatches
    return Code(steps, binder.slot_names, len(binder.handle_of), binder.slot_of, forms)


@dataclass
class _Binder:
    """Turns rows of one rank's stream into bound steps, and numbers the slots and handles that they use."""

    program: Program
    rank: int
    stream: Sequence[Instruction]
    stages: Mapping[int, ComputeStage]
    boundaries: Sequence[Boundary]
    handlers: Mapping[InstructionKind, Handler]
    recomputed: frozenset[tuple[int, int]]
    """(stage, microbatch) of every R."""
    tied: Sequence[SharedParameter] = ()
    replicas: Mapping[ReplicaKey, ReplicatedStage] = field(default_factory=dict)
    of_one: int = 0
    """Forms of messages of each microbatch, where these have their own; else 0."""
    slot_of: dict[tuple[int, int, int], int] = field(default_factory=dict)
    slot_names: list[str] = field(default_factory=list)
    handle_of: dict[int, int] = field(default_factory=dict)
    received: set[int] = field(default_factory=set)
    """Messages whose receive has been posted so far."""

    def steps(self, cells: CellSource) -> list[BoundStep]:
        """The whole stream. An instruction that runs in micro-steps takes messages around it into its middle."""
        micro = [self.micro_steps(position, cells) for position in range(len(self.stream))]
        moved = {part.at for parts in micro for part in parts if isinstance(part, MovedMessage)}
        steps: list[BoundStep] = []
        position = 0
        while position < len(self.stream):
            for part in micro[position]:
                steps.append(self.whole(part.at) if isinstance(part, MovedMessage) else self.bound(part, position))
            if not micro[position] and position not in moved:
                steps.append(self.whole(position))
            position += batch_width(self.stream, position)
        return steps

    def whole(self, position: int) -> BoundStep:
        """One step for a whole instruction, or for a batch of messages that are posted together."""
        instruction, width = self.stream[position], batch_width(self.stream, position)
        if instruction.kind in POSTS:
            operands: Any = self.batch(self.stream[position : position + width])
        else:
            operands = self.operands(instruction)
        return self.bound((self.handlers[instruction.kind], operands), position, width)

    def bound(self, call: Call, position: int, width: int = 1) -> BoundStep:
        row = int(self.program.rank_start[self.rank]) + position
        return BoundStep(*call, row, width, self.stream[position], label_of(call))

    def micro_steps(self, position: int, cells: CellSource) -> list[Call | MovedMessage]:
        """What an instruction on segmented stages becomes, with the messages that move into it; empty for others."""
        instruction = self.stream[position]
        shapes = shapes_of(instruction, self.stages, self.recomputed)
        if shapes is None:
            return []
        kind, operands = instruction.kind_name, self.operands(instruction)
        first, second = operands[:2] if isinstance(operands, PairOperands) else (operands, operands)
        return expand(interleave_messages(self.stream, position, cells(kind, *shapes)), kind, first, second)

    def operands(self, instruction: Instruction) -> Any:
        """The operands of an instruction that is no SEND or RECV."""
        x = instruction
        match x.kind:
            case InstructionKind.CELL:
                first, second = x.ops
                return PairOperands(self.compute(*first), self.compute(*second), (first[0], second[0]))
            case InstructionKind.WAIT:
                slot = self.slot(x.channel, x.stage, x.microbatch) if x.message in self.received else -1
                return WaitOperands(self.handle(x.message), slot)
            case InstructionKind.START | InstructionKind.JOIN:
                work = self.program.works.work(x.work)
                names = WORK_FACTS[work.kind].name, work.lane.name.lower()
                late = work.kind is WorkKind.SCATTER and self.replica_keys[x.work].late
                return WorkOperands(*names, self.working(x.work), work.microbatch, x.work, work.bytes, late, work.group)
            case InstructionKind.REDUCE if x.is_tied:
                return self.tied_operands[x.peer, x.message]
            case InstructionKind.REDUCE:
                return ReduceOperands(x.peer, self.reduced[x.stage])
            case _:
                return self.compute(OpKind(x.kind), x.stage, x.microbatch)

    def compute(self, kind: OpKind, stage: int, microbatch: int) -> ComputeOperands:
        """The operands of one op."""
        last = self.program.stages - 1
        read = write = -1
        if kind is OpKind.F:
            read = self.slot(Channel.ACTIVATION, stage - 1, microbatch)
            write = self.slot(Channel.ACTIVATION, stage, microbatch) if stage < last else -1
        elif FACTS[kind].backward:
            read = self.slot(Channel.GRADIENT, stage + 1, microbatch) if stage < last else -1
            write = self.slot(Channel.GRADIENT, stage, microbatch) if stage > 0 else -1
        probes = probes_of([spec.dtype for spec in self.boundaries[stage + 1].tensors]) if kind is OpKind.F else ()
        recomputed = (stage, microbatch) in self.recomputed
        return ComputeOperands(self.stages[stage], microbatch, read, write, kind is OpKind.I, probes, recomputed)

    def working(self, number: int) -> Any:
        """The stage that a work is about, or what a work among its replicas runs on."""
        work = self.program.works.work(number)
        if not WORK_FACTS[work.kind].of_stage or work.kind is WorkKind.SNAPSHOT:
            return self.stages[work.stage]
        if (key := self.replica_keys[number]) not in self.replicas:
            raise RuntimeFault(
                f"{self.program.name} has the {work}, and this pipeline has no replicas that take part",
                "give the mesh that the program was compiled for, or compile it without replicas",
            )
        return self.replicas[key]

    @cached_property
    def replica_keys(self) -> dict[int, ReplicaKey]:
        """What each work among replicas runs on, by its number."""
        return replica_keys(self.stream, self.program.works)

    def batch(self, batch: Sequence[Instruction]) -> tuple[MessageOperands, ...]:
        """The messages that are posted together."""
        self.received.update(x.message for x in batch if x.kind is InstructionKind.RECV)
        return tuple([self.message(x) for x in batch])

    def message(self, x: Instruction) -> MessageOperands:
        slot = self.slot(x.channel, x.stage, x.microbatch)
        edge = x.stage + 1 if x.channel == Channel.ACTIVATION else len(self.boundaries) + x.stage
        edge += x.microbatch * self.of_one
        receive, carried = x.kind is InstructionKind.RECV, self.communicator.get(x.message, -1)
        return MessageOperands(receive, x.peer, edge, slot, self.handle(x.message), carried)

    @cached_property
    def communicator(self) -> dict[int, int]:
        """The communicator of each message, by number; empty where the program has none."""
        if not self.program.communicators.size:
            return {}
        messages = self.program.message[sends_of(self.program)]
        return dict(zip(messages.tolist(), self.program.communicators.tolist(), strict=True))

    def slot(self, channel: int, stage: int, microbatch: int) -> int:
        """The slot of what ``stage`` produces for ``microbatch``; numbered on first use."""
        key = (channel, stage, microbatch)
        if key not in self.slot_of:
            self.slot_of[key] = len(self.slot_names)
            what = "activation" if channel == Channel.ACTIVATION else "gradient"
            owner = f"stage {stage}" if stage >= 0 else "the batch"
            self.slot_names.append(f"the {what} of {owner} for microbatch {microbatch}")
        return self.slot_of[key]

    def handle(self, message: int) -> int:
        return self.handle_of.setdefault(message, len(self.handle_of))

    @cached_property
    def reduced(self) -> dict[int, tuple[nn.Parameter, ...]]:
        """The parameters of each REDUCE, by stage: a shared parameter is summed with the last of its stages."""
        order = [x.stage for x in self.stream if x.kind is InstructionKind.REDUCE and not x.is_tied]
        last = {id(p): stage for stage in order for p in self.stages[stage].module.parameters()}
        return {
            stage: tuple(p for p in self.stages[stage].module.parameters() if last[id(p)] == stage) for stage in order
        }

    @cached_property
    def tied_operands(self) -> dict[tuple[int, int], TiedOperands]:
        """The operands of each REDUCE of tied weights here, by peer and message: they come in the order of the ties."""
        modules = {index: stage.module for index, stage in self.stages.items()}
        ends = []
        for tie, of_tie in enumerate(self.program.tied):
            place_of = {copy.rank: place for place, copy in enumerate(copies_of(of_tie, self.program.placement))}
            peers = [x.peer for x in exchanges_of(of_tie, self.program.placement) if x.rank == self.rank]
            uses = [shared.of(modules) for shared in self.tied if shared.stages == of_tie.stages] if peers else []
            parameters = tuple(parameter for parameter in uses if parameter is not None)
            for number, peer in enumerate(peers, 1):
                places = place_of[self.rank], place_of[peer]
                ends.append(TiedOperands(tie, peer, *places, len(place_of), number == len(peers), parameters))
        rows = [x for x in self.stream if x.is_tied]
        return {(x.peer, x.message): end for x, end in zip(rows, ends, strict=True)}
