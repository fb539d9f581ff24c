"""Micro-steps: an instruction on segmented stages, taken apart in the order of its cell program.

    CELL 1 F 3 & 0 B 1      begin F | run, start, wait, ... | begin B | ... | outputs | ... | input gradients | ...
    WAIT activation, gradient    ^ waited for here             ^ and here   ^                 ^
    SEND activation, gradient                                               posted here       and here

Each micro-step is a step of the executor, so that ranks that share a process can stop inside a cell. The message that
a half needs is waited for when the half begins. Its own message is sent when it is complete
(`schedc.cell.with_messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from schedc.cell.graph import StageShape
from schedc.cell.program import HALVES, Action, CellProgram, CellStep, Edge, Half, graph_of
from schedc.cell.with_messages import MovedMessage
from schedc.cell.with_messages import Part as PartOfCell
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import Instruction
from schedc_runtime.execute.code import Call, Handler
from schedc_runtime.execute.handlers import keep_outputs
from schedc_runtime.execute.operands import ComputeOperands, ComputeStage
from schedc_runtime.execute.registers import Registers

CellSource = Callable[[str, StageShape | None, StageShape | None], CellProgram]
"""The program of a cell, given its kind (`KINDS`) and the graphs of its forward's and its backward's stage."""


Slots = Set[tuple[int, int]]
"""(stage, microbatch) of every R of a program."""


class MicroStep(NamedTuple):
    """Operands of one micro-step on a stage in segments.

    node: index in the stage's graph. run: the method for this action and half (`Stage.method`).
    """

    stage: Any
    microbatch: int
    node: int
    action: Action
    half: Half
    run: Callable[[int, int], None]


def micro_step(registers: Registers, op: MicroStep) -> bool | None:
    """One micro-step on a node. A wait for an exchange that has not arrived yet comes back."""
    if op.action is Action.WAIT and not op.stage.ready(op.microbatch, op.node):
        return True
    op.run(op.microbatch, op.node)
    return None


def shapes_of(
    instruction: Instruction, stages: Mapping[int, ComputeStage], recomputed: Slots
) -> tuple[StageShape | None, StageShape | None] | None:
    """The graphs on which the halves of an instruction run; None where a stage runs as a whole, or nothing computes."""
    ops = instruction.ops if instruction.computes else ()
    graphs = [_shape_of(stages[stage], kind, (stage, number) in recomputed) for kind, stage, number in ops]
    if not graphs or None in graphs:
        return None
    on_first, on_second = HALVES[instruction.kind_name]
    return graphs[0] if on_first else None, graphs[-1] if on_second else None


def _shape_of(stage: ComputeStage, kind: OpKind, recomputed: bool) -> StageShape | None:
    """The graph of a stage as an op of this kind has it. recomputed: whether its microbatch has an R."""
    if kind is OpKind.R or stage.shape is None:
        return stage.shape_with_r
    return stage.shape.ready if recomputed and FACTS[kind].backward else stage.shape


def _begin(registers: Registers, op: ComputeOperands) -> None:
    inputs, target = registers.take(op.read), registers.targets[op.microbatch]
    op.cut.begin(op.microbatch, inputs, target, registers.loss_scale, recompute_later=op.recomputed)


def _outputs(registers: Registers, op: ComputeOperands) -> None:
    keep_outputs(registers, op, op.cut.outputs(op.microbatch))


def _begin_backward(registers: Registers, op: ComputeOperands) -> None:
    op.cut.begin_backward(op.microbatch, registers.take(op.read) if op.read >= 0 else ())


def _gradients(registers: Registers, op: ComputeOperands) -> None:
    gradients = op.cut.input_gradients(op.microbatch)
    if op.write >= 0:
        registers.values[op.write] = gradients


def _on_stage(name: str) -> Handler:
    """A handler that calls a method of the stage for the microbatch."""

    def handler(registers: Registers, op: ComputeOperands) -> None:
        getattr(op.stage, name)(op.microbatch)

    return handler


_end_backward = _on_stage("end_backward")
_begin_recompute = _on_stage("begin_recompute")
_recompute_rest = _on_stage("recompute_rest")
_end_recompute = _on_stage("end_recompute")

EDGES: dict[Edge, Handler] = {
    Edge(Half.FORWARD, opens=True): _begin,
    Edge(Half.FORWARD, opens=False): _outputs,
    Edge(Half.BACKWARD, opens=True): _begin_backward,
    Edge(Half.BACKWARD, opens=False): _gradients,
}
"""The handler of each point at which a half meets its messages."""

_WORDS: dict[Handler, str] = {
    _begin: "begin", _outputs: "outputs", _begin_backward: "begin backward", _gradients: "input gradients",
    _end_backward: "end", _begin_recompute: "begin again", _recompute_rest: "the rest again",
    _end_recompute: "end again",
}  # fmt: skip


def label_of(call: Call) -> str:
    """What a micro-step does, as ``run backward of 0.experts``; "" for a call that runs a whole instruction."""
    handler, operands = call
    if isinstance(operands, MicroStep):
        return f"{operands.action} {operands.half} of {operands.stage.shape.nodes[operands.node].name}"
    return _WORDS.get(handler, "")


def expand(
    parts: Sequence[PartOfCell], kind: str, first: ComputeOperands, second: ComputeOperands
) -> list[Call | MovedMessage]:
    """The micro-steps of one instruction of ``kind`` (`KINDS`), given its parts and its ops; one op is both.

    Messages that move into the instruction are left as they are.
    """
    calls: list[Call | MovedMessage] = []
    ends = [i for i, part in enumerate(parts) if not isinstance(part, MovedMessage) and part.half is Half.BACKWARD]
    for i, part in enumerate(parts):
        if isinstance(part, MovedMessage):
            calls.append(part)
            continue
        op = graph_of(kind, part.half, first, second)
        calls.append(_on_graph(part, op) if isinstance(part, CellStep) else (EDGES[part], op))
        if [i] == ends[-1:]:
            calls.append((_end_backward, op))
    return _recomputing(calls, second) if kind == "R" else calls


def _recomputing(calls: list[Call | MovedMessage], op: ComputeOperands) -> list[Call | MovedMessage]:
    """The micro-steps of an R: regions outside its cell program are recomputed before its first wait."""
    steps = [call[-1] for call in calls]
    waits = (i for i, x in enumerate(steps) if isinstance(x, MicroStep) and x.action is Action.WAIT)
    first = next(waits, len(calls))
    return [(_begin_recompute, op), *calls[:first], (_recompute_rest, op), *calls[first:], (_end_recompute, op)]


def _on_graph(step: CellStep, op: ComputeOperands) -> Call:
    run = op.cut.method(step.action, step.half)
    return micro_step, MicroStep(op.stage, op.microbatch, step.node, step.action, step.half, run)
