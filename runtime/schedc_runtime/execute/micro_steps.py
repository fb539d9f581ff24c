"""Cells at run time: an instruction on segmented stages becomes micro-steps, in the order of its cell program.

    CELL 1 F 3 & 0 B 1      begin F | run, start, wait, ... | begin B | ... | outputs | ... | input gradients | ...
    WAIT activation, gradient    ^ waited for here             ^ and here   ^                 ^
    SEND activation, gradient                                               posted here       and here

Each micro-step is a step of the executor, so that ranks that share a process can stop inside a cell. What a half takes
is waited for when it begins, what it makes is sent when it is done (`schedc.cell.with_messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from schedc.cell.graph import StageShape
from schedc.cell.program import Action, CellProgram, Edge, Half, Step
from schedc.cell.with_messages import MovedMessage
from schedc.cell.with_messages import Part as PartOfCell
from schedc_runtime.execute.handlers import Cell, Compute, Handler
from schedc_runtime.segments import SegmentedStage

if TYPE_CHECKING:
    from schedc_runtime.execute.executor import Executor

CellSource = Callable[[str, StageShape | None, StageShape | None], CellProgram]
"""The program of a cell, given its kind, of `KINDS`, and the graphs of its forward's and its backward's stage."""


class Micro(NamedTuple):
    """Operands of one micro-step."""

    stage: SegmentedStage
    microbatch: int
    node: int


def _begin(run: Executor, op: Compute) -> None:
    inputs, target = run.take(op.read), run.targets[op.microbatch]
    _segmented(op).begin(op.microbatch, inputs, target, run.loss_scale, again=op.again)


def _outputs(run: Executor, op: Compute) -> None:
    outputs = _segmented(op).outputs(op.microbatch)
    if op.write >= 0:
        run.values[op.write] = outputs
    if run.probing:
        run.probes.append((op, [outputs[place].sum(dtype=dtype) for place, dtype in op.probes]))


def _begin_backward(run: Executor, op: Compute) -> None:
    _segmented(op).begin_backward(op.microbatch, run.take(op.read) if op.read >= 0 else ())


def _gradients(run: Executor, op: Compute) -> None:
    gradients = _segmented(op).input_gradients(op.microbatch)
    if op.write >= 0:
        run.values[op.write] = gradients


def _of_microbatch(act: Callable[[SegmentedStage, int], None]) -> Handler:
    def handler(run: Executor, op: Compute) -> None:
        act(_segmented(op), op.microbatch)

    return handler


_end_backward = _of_microbatch(SegmentedStage.end_backward)
_begin_again = _of_microbatch(SegmentedStage.begin_again)
_rest_again = _of_microbatch(SegmentedStage.rest_again)
_end_again = _of_microbatch(SegmentedStage.end_again)


def _does(act: Callable[[SegmentedStage, int, int], None]) -> Handler:
    def handler(run: Executor, op: Micro) -> None:
        act(op.stage, op.microbatch, op.node)

    return handler


def _awaits(
    ready: Callable[[SegmentedStage, int, int], bool], act: Callable[[SegmentedStage, int, int], None]
) -> Handler:
    def handler(run: Executor, op: Micro) -> bool | None:
        if not ready(op.stage, op.microbatch, op.node):
            return True
        act(op.stage, op.microbatch, op.node)
        return None

    return handler


MICRO: dict[tuple[Half, Action], Handler] = {
    (Half.FORWARD, Action.RUN): _does(SegmentedStage.run),
    (Half.FORWARD, Action.START): _does(SegmentedStage.start),
    (Half.FORWARD, Action.WAIT): _awaits(SegmentedStage.ready, SegmentedStage.wait),
    (Half.BACKWARD, Action.RUN): _does(SegmentedStage.run_backward),
    (Half.BACKWARD, Action.START): _does(SegmentedStage.start_backward),
    (Half.BACKWARD, Action.WAIT): _awaits(SegmentedStage.ready, SegmentedStage.wait_backward),
    (Half.WEIGHT, Action.RUN): _does(SegmentedStage.run_weight),
    (Half.AGAIN, Action.RUN): _does(SegmentedStage.run_again),
    (Half.AGAIN, Action.START): _does(SegmentedStage.start_again),
    (Half.AGAIN, Action.WAIT): _awaits(SegmentedStage.ready_again, SegmentedStage.wait_again),
}

EDGES: dict[Edge, Handler] = {
    Edge(Half.FORWARD, opens=True): _begin,
    Edge(Half.FORWARD, opens=False): _outputs,
    Edge(Half.BACKWARD, opens=True): _begin_backward,
    Edge(Half.BACKWARD, opens=False): _gradients,
}

Made = tuple[Handler, Any] | MovedMessage
"""A handler and its operands, as in a `Code`, or a message of the stream."""


def _segmented(op: Compute) -> SegmentedStage:
    assert isinstance(op.stage, SegmentedStage)
    return op.stage


def segmented(operands: Any) -> bool:
    """Whether an instruction runs on segmented stages, both of them in a pair."""
    parts = (operands.forward, operands.backward) if isinstance(operands, Cell) else (operands,)
    return all(isinstance(part, Compute) and isinstance(part.stage, SegmentedStage) for part in parts)


def shape_of(stage: SegmentedStage, kind: str, again: bool) -> StageShape:
    """The graph of a stage as a cell of ``kind`` has it. again: whether its microbatch has an R."""
    if kind == "R":
        return stage.remaking.shape
    return stage.shape.ready if again else stage.shape


def shapes_of(
    kind: str, forward: Compute | None, backward: Compute | None
) -> tuple[StageShape | None, StageShape | None]:
    """The graphs of both halves of an instruction."""
    return (
        None if forward is None else _segmented(forward).shape,
        None if backward is None else shape_of(_segmented(backward), kind, backward.again),
    )


def expand(parts: Sequence[PartOfCell], kind: str, forward: Compute | None, backward: Compute | None) -> list[Made]:
    """The micro-steps of one instruction: of its parts, with the messages that move into it left as they are.

    kind: one of `KINDS`; the halves that it has.
    """
    made: list[Made] = []
    ends = [at for at, part in enumerate(parts) if not isinstance(part, MovedMessage) and part.half is Half.BACKWARD]
    for at, part in enumerate(parts):
        if isinstance(part, MovedMessage):
            made.append(part)
            continue
        op = forward if part.half is Half.FORWARD else backward
        assert op is not None
        made.append(_micro(part, op) if isinstance(part, Step) else (EDGES[part], op))
        if [at] == ends[-1:]:
            made.append((_end_backward, op))
    return _remade(made, backward) if kind == "R" else made


def _remade(made: list[Made], op: Compute | None) -> list[Made]:
    """An R: what is in none of its steps is worked out before it first waits."""
    waits = MICRO[Half.AGAIN, Action.WAIT]
    first = next((at for at, step in enumerate(made) if step[0] is waits), len(made))
    return [(_begin_again, op), *made[:first], (_rest_again, op), *made[first:], (_end_again, op)]


def _micro(step: Step, op: Compute) -> tuple[Handler, Any]:
    return MICRO[step.half, step.action], Micro(_segmented(op), op.microbatch, step.node)


_WORDS: dict[Handler, str] = {
    _begin: "begin", _outputs: "outputs", _begin_backward: "begin backward", _gradients: "input gradients",
    _end_backward: "end", _begin_again: "begin again", _rest_again: "the rest again",
    _end_again: "end again",
    **{MICRO[key]: f"{key[1]} {key[0]}" for key in MICRO},
}  # fmt: skip


def part_of(step: tuple[Handler, Any]) -> str:
    """What a micro-step does, as ``run backward of 0.experts``; "" for a step that is a whole instruction."""
    handler, operands = step
    if isinstance(operands, Micro):
        return f"{_WORDS.get(handler, 'a step')} of {operands.stage.shape.nodes[operands.node].name}"
    return _WORDS.get(handler, "")


class Part(NamedTuple):
    """A micro-step on a node, as traces name it. role: of a segment ``experts``, of an exchange ``dispatch.rail``."""

    action: Action
    half: Half
    layer: int
    role: str

    @classmethod
    def parse(cls, text: str) -> Part | None:
        """What `part_of` gives, read back; None where it is no micro-step on a node."""
        what, of, name = text.partition(" of ")
        if not of:
            return None
        action, half = what.split()
        layer, _, role = name.partition(".")
        return cls(Action(action), Half(half), int(layer), role) if role else cls(Action(action), Half(half), -1, name)


@cache
def serial(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """One half after the other, every exchange waited for at once: what a cell program must equal bit by bit."""
    steps: list[Step] = []
    activation_at = gradient_at = -1
    if forward is not None and "F" in kind:
        for node, what in enumerate(forward.nodes):
            steps += _steps(Half.FORWARD, node, what.exchange)
        activation_at = len(steps)
    if backward is not None and kind != "W":
        for node in backward.again:
            steps += _steps(Half.AGAIN, node, backward.nodes[node].exchange)
    if backward is not None and kind not in ("W", "R"):
        for node in reversed(backward.backward):
            steps += _steps(Half.BACKWARD, node, backward.nodes[node].exchange)
        gradient_at = len(steps)
    if backward is not None and kind[-1] in "BW":
        steps += [Step(Action.RUN, Half.WEIGHT, node) for node in reversed(backward.weights)]
    return CellProgram(steps=tuple(steps), activation_at=activation_at, gradient_at=gradient_at, kind=kind)


def _steps(half: Half, node: int, exchange: bool) -> list[Step]:
    if not exchange:
        return [Step(Action.RUN, half, node)]
    return [Step(Action.START, half, node), Step(Action.WAIT, half, node)]
