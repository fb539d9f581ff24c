"""Micro-steps: an instruction on segmented stages, taken apart in the order of its cell program.

    CELL 1 F 3 & 0 B 1      begin F | run, start, wait, ... | begin B | ... | outputs | ... | input gradients | ...
    WAIT activation, gradient    ^ waited for here             ^ and here   ^                 ^
    SEND activation, gradient                                               posted here       and here

Each micro-step is a step of the executor, so that ranks that share a process can stop inside a cell. The message that
a half needs is waited for when the half begins. Its own message is sent when it is complete
(`schedc.cell.with_messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from schedc.cell.graph import StageShape
from schedc.cell.program import Action, CellProgram, CellStep, Edge, Half, graph_of
from schedc.cell.with_messages import MovedMessage
from schedc.cell.with_messages import Part as PartOfCell
from schedc.ir.ops import FACTS, OpKind
from schedc_runtime.execute.code import Call, Handler
from schedc_runtime.execute.handlers import keep_outputs
from schedc_runtime.execute.operands import ComputeOperands, PairOperands
from schedc_runtime.execute.registers import Registers
from schedc_runtime.segments import SegmentedStage
from schedc_runtime.segments.stage import MICRO_STEPS

CellSource = Callable[[str, StageShape | None, StageShape | None], CellProgram]
"""The program of a cell, given its kind (`KINDS`) and the graphs of its forward's and its backward's stage."""


class MicroStep(NamedTuple):
    """Operands of one micro-step. node: index in the stage's graph."""

    stage: SegmentedStage
    microbatch: int
    node: int


def segmented(stage: object) -> SegmentedStage:
    """The stage, known to run in segments."""
    assert isinstance(stage, SegmentedStage)
    return stage


def shape_of(stage: SegmentedStage, kind: OpKind, recomputed: bool) -> StageShape:
    """The graph of a stage as an op of this kind has it. recomputed: whether its microbatch has an R."""
    if kind is OpKind.R:
        return stage.shape_with_r
    return stage.shape.ready if recomputed and FACTS[kind].backward else stage.shape


def shapes_of(
    kind: str, forward: ComputeOperands | None, backward: ComputeOperands | None
) -> tuple[StageShape | None, StageShape | None]:
    """The two graphs of an instruction of ``kind``, whose ops on them are given."""
    return (
        None if forward is None else shape_of(segmented(forward.stage), OpKind[kind[0]], forward.recomputed),
        None if backward is None else shape_of(segmented(backward.stage), OpKind[kind[-1]], backward.recomputed),
    )


def _begin(registers: Registers, op: ComputeOperands) -> None:
    inputs, target = registers.take(op.read), registers.targets[op.microbatch]
    segmented(op.stage).begin(op.microbatch, inputs, target, registers.loss_scale, recompute_later=op.recomputed)


def _outputs(registers: Registers, op: ComputeOperands) -> None:
    keep_outputs(registers, op, segmented(op.stage).outputs(op.microbatch))


def _begin_backward(registers: Registers, op: ComputeOperands) -> None:
    segmented(op.stage).begin_backward(op.microbatch, registers.take(op.read) if op.read >= 0 else ())


def _gradients(registers: Registers, op: ComputeOperands) -> None:
    gradients = segmented(op.stage).input_gradients(op.microbatch)
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


def _on_node(name: str) -> Handler:
    """A handler that calls a method of the stage for one node of the microbatch."""

    def handler(registers: Registers, op: MicroStep) -> None:
        getattr(op.stage, name)(op.microbatch, op.node)

    return handler


def _when_ready(ready: str, name: str) -> Handler:
    """As `_on_node`, for an exchange that may not have arrived yet."""

    def handler(registers: Registers, op: MicroStep) -> bool | None:
        if not getattr(op.stage, ready)(op.microbatch, op.node):
            return True
        getattr(op.stage, name)(op.microbatch, op.node)
        return None

    return handler


def _micro_step(half: Half, action: Action, name: str) -> Handler:
    if action is not Action.WAIT:
        return _on_node(name)
    return _when_ready("ready_recompute" if half is Half.RECOMPUTE else "ready", name)


MICRO = {key: _micro_step(*key, name) for key, name in MICRO_STEPS.items()}
"""The handler of each micro-step on a node."""

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
    **{MICRO[key]: f"{key[1]} {key[0]}" for key in MICRO},
}  # fmt: skip


def label_of(call: Call) -> str:
    """What a micro-step does, as ``run backward of 0.experts``; "" for a call that runs a whole instruction."""
    handler, operands = call
    if isinstance(operands, MicroStep):
        return f"{_WORDS[handler]} of {operands.stage.shape.nodes[operands.node].name}"
    return _WORDS.get(handler, "")


def on_segments(operands: Any) -> bool:
    """Whether an instruction runs on segmented stages, both of them in a pair."""
    ops = (operands.first, operands.second) if isinstance(operands, PairOperands) else (operands,)
    return all(isinstance(op, ComputeOperands) and isinstance(op.stage, SegmentedStage) for op in ops)


def expand(
    parts: Sequence[PartOfCell], kind: str, forward: ComputeOperands | None, backward: ComputeOperands | None
) -> list[Call | MovedMessage]:
    """The micro-steps of one instruction of ``kind`` (`KINDS`), given its parts and the ops on its two graphs.

    Messages that move into the instruction are left as they are.
    """
    calls: list[Call | MovedMessage] = []
    ends = [i for i, part in enumerate(parts) if not isinstance(part, MovedMessage) and part.half is Half.BACKWARD]
    for i, part in enumerate(parts):
        if isinstance(part, MovedMessage):
            calls.append(part)
            continue
        op = graph_of(kind, part.half, forward, backward)
        assert op is not None
        calls.append(_on_graph(part, op) if isinstance(part, CellStep) else (EDGES[part], op))
        if [i] == ends[-1:]:
            calls.append((_end_backward, op))
    return _recomputing(calls, backward) if kind == "R" else calls


def _recomputing(calls: list[Call | MovedMessage], op: ComputeOperands | None) -> list[Call | MovedMessage]:
    """The micro-steps of an R: regions outside its cell program are recomputed before its first wait."""
    waits = MICRO[Half.RECOMPUTE, Action.WAIT]
    first = next((i for i, call in enumerate(calls) if call[0] is waits), len(calls))
    return [(_begin_recompute, op), *calls[:first], (_recompute_rest, op), *calls[first:], (_end_recompute, op)]


def _on_graph(step: CellStep, op: ComputeOperands) -> Call:
    return MICRO[step.half, step.action], MicroStep(segmented(op.stage), op.microbatch, step.node)
