"""Writes a rank's stream out as Python: a line or some for each step, operands as constants, no table of calls.

The executor's loop spends half of its time on calls, operands and tables that are the same in every step of training.
What handlers do stands in `handlers.py`. This file has the same for the handlers that plain streams call most, with
the operands put in. Each other handler is called as the loop calls it. A step's first line writes its mark.

A stream is cut into parts, each a generator. It yields the position of a step that cannot run yet, and goes on there.
The line that runs tells the step, also in a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType, GeneratorType, TracebackType
from typing import Any, NamedTuple, TypeAlias

from schedc_runtime.execute.code import BoundStep, Code, Handler
from schedc_runtime.execute.handlers import backward, forward, post, recompute, wait, weight
from schedc_runtime.execute.operands import ComputeOperands, MessageOperands, WaitOperands
from schedc_runtime.execute.registers import Registers
from schedc_runtime.transport.base import Transfer
from schedc_runtime.written_code import function_of

STEPS_OF_PART = 2048
"""Steps per part: Python compiles a function of any length in one piece, which takes memory."""

Run: TypeAlias = "GeneratorType[int, None, None]"


class WrittenPart(NamedTuple):
    """A part of a stream. begin: runs it. code: that of the generator. positions: [lines + 1] the step of each line."""

    begin: Callable[[Registers, memoryview], Run]
    code: CodeType
    positions: Sequence[int]


def written_out(code: Code, marks: Sequence[int], name: str, *, cooperative: bool) -> list[WrittenPart]:
    """The parts of a stream, in order.

    marks: [steps] what to write when a step begins. name: of the rank, for tracebacks. cooperative: as the transport.
    """
    parts = []
    for first in range(0, len(code.steps), STEPS_OF_PART):
        writer = _StreamWriter(cooperative)
        for position in range(first, min(first + STEPS_OF_PART, len(code.steps))):
            writer.step(position, code.steps[position], marks[position])
        parts.append(writer.part(f"<{name}, from step {first}>"))
    return parts


def position_of(parts: Sequence[WrittenPart], trace: TracebackType | None) -> int:
    """The step that raised an error; -1 if none of ``parts`` is in its traceback."""
    while trace is not None:
        for part in parts:
            if trace.tb_frame.f_code is part.code:
                return part.positions[trace.tb_lineno]
        trace = trace.tb_next
    return -1


class _StreamWriter:
    """Writes one part. Names of constants end with a number; those of what a step of training brings do not."""

    def __init__(self, cooperative: bool) -> None:
        self.cooperative = cooperative
        self.constants: dict[str, Any] = {"Transfer": Transfer, "new": tuple.__new__}
        self.known: dict[str, str] = {}
        """Locals that are set at the beginning of the part, and to what."""
        self.lines: list[str] = []
        self.positions: list[int] = []

    def step(self, position: int, step: BoundStep, mark: int) -> None:
        """Write one step."""
        written = _WRITTEN.get(step.handler)
        lines = [f"word[0] = {mark}"]
        if written is None:
            call = f"{self.constant('handler', position, step.handler)}(registers, {self.operands(position, step)})"
            lines.append(f"while {call}: yield {position}")
        else:
            lines += written(self, position, step)
        self.lines += lines
        self.positions += [position] * len(lines)

    def part(self, file: str) -> WrittenPart:
        """What has been written, as a function."""
        begin = ["def run(registers, word):", *(f" {name} = {value}" for name, value in self.known.items())]
        text = "\n".join([*begin, *(f" {line}" for line in self.lines), " return", " yield", ""])
        run = function_of("run", text, file, self.constants, shown=False)  # a long text, which nobody reads
        first = self.positions[0]
        return WrittenPart(run, run.__code__, [first] * (len(begin) + 1) + self.positions + [self.positions[-1]] * 2)

    def constant(self, name: str, number: int, value: Any) -> str:
        self.constants[f"{name}{number}"] = value
        return f"{name}{number}"

    def operands(self, position: int, step: BoundStep) -> str:
        return self.constant("operands", position, step.operands)

    def local(self, name: str, value: str) -> str:
        self.known[name] = value
        return name

    def of_registers(self, name: str) -> str:
        return self.local(name, f"registers.{name}")

    def method(self, op: ComputeOperands, name: str) -> str:
        """A method of a stage."""
        constant = self.constant(f"{name}_of_stage_", op.stage.index, getattr(op.stage, name))
        return self.local(f"{name}_{op.stage.index}", constant)

    def call(self, op: ComputeOperands, kind: str) -> str:
        """What a stage does in each F without an R, or B, of a run."""
        calls = self.local(f"calls_{op.stage.index}", f"{self.method(op, 'calls_of_run')}()")
        return self.local(f"{kind}_{op.stage.index}", f"{calls}.{kind}")

    def take(self, name: str, slot: int) -> str:
        """Take a value, as `Registers.take` does, which names one that is not there. No value that is there is empty
        but those of boundaries without tensors."""
        values, take = self.of_registers("values"), self.of_registers("take")
        return f"{name} = {values}[{slot}] or {take}({slot}); {values}[{slot}] = None"


def _forward(writer: _StreamWriter, position: int, step: BoundStep) -> list[str]:
    op: ComputeOperands = step.operands
    targets, scale = writer.of_registers("targets"), writer.of_registers("loss_scale")
    call = f"{op.microbatch}, x, {targets}[{op.microbatch}], {scale}"
    plain = f"y = {writer.call(op, 'F')}({call})"
    line = f"y = {writer.method(op, 'forward')}({call}, recompute_later=True)" if op.recomputed else plain
    lines = [writer.take("x", op.read), f"{line}; x = None"]
    if op.write >= 0:
        lines.append(f"{writer.of_registers('values')}[{op.write}] = y")
    if op.probes:
        lines.append(f"if {writer.of_registers('probing')}:")
        operands, append = writer.operands(position, step), writer.local("append", "registers.probes.append")
        for output, options in op.probes:
            given = f"**{writer.constant(f'options{output}_', position, options)}" if options else ""
            lines.append(f" {append}(({operands}, y[{output}].sum({given})))")
    return [*lines, "y = None"]


def _backward(writer: _StreamWriter, position: int, step: BoundStep) -> list[str]:
    op: ComputeOperands = step.operands
    given = f"{op.microbatch}, {'x' if op.read >= 0 else '()'}"
    call = f"{writer.method(op, 'backward')}({given}, defer=True)" if op.defer else f"{writer.call(op, 'B')}({given})"
    write = f"{writer.of_registers('values')}[{op.write}] = {call}" if op.write >= 0 else call
    return [writer.take("x", op.read), write, "x = None"] if op.read >= 0 else [write]


def _weight(writer: _StreamWriter, position: int, step: BoundStep) -> list[str]:
    return [f"{writer.method(step.operands, 'weight')}({step.operands.microbatch})"]


def _recompute(writer: _StreamWriter, position: int, step: BoundStep) -> list[str]:
    return [f"{writer.method(step.operands, 'recompute')}({step.operands.microbatch})"]


def _post(writer: _StreamWriter, position: int, step: BoundStep) -> list[str]:
    batch: tuple[MessageOperands, ...] = step.operands
    lines, posts, transfers, taken = [], [], [], []
    for number, (receive, peer, edge, slot, handle, communicator) in enumerate(batch):
        form = writer.local(f"form_{edge}", f"registers.forms[{edge}]")
        tensors = f"x{number}"
        if not receive:
            lines += [writer.take(tensors, slot), f"{form}.check({tensors})"]
            taken.append(tensors)
        elif writer.cooperative:
            tensors = "()"
        else:
            tensors = f"{form}.buffers({writer.of_registers('device')})"
        if writer.cooperative:
            end = f"registers.transport.end({peer}, {receive}, {communicator})"
            post = writer.local(f"{'from' if receive else 'to'}_{peer}_{communicator + 1}", end)
            posts.append(f"{writer.of_registers('handles')}[{handle}] = {post}({tensors}, {form})")
        transfers.append(f"new(Transfer, ({peer}, {receive}, {tensors}, {communicator}, {form}))")
    if not writer.cooperative:
        handles = ", ".join(f"{writer.of_registers('handles')}[{message.handle}]" for message in batch)
        posts.append(f"{handles}, = {writer.local('post', 'registers.transport.post')}([{', '.join(transfers)}])")
    return [*lines, *posts, *(f"{name} = None" for name in taken)]


def _wait(writer: _StreamWriter, position: int, step: BoundStep) -> list[str]:
    op: WaitOperands = step.operands
    handles, posted = writer.of_registers("handles"), writer.of_registers("posted")
    lines = [f"h = {handles}[{op.handle}] or {posted}({op.handle})"]
    if writer.cooperative:
        lines.append(f"while not {writer.local('ready', 'registers.transport.ready')}(h): yield {position}")
    else:
        lines.append(f"{writer.local('wait', 'registers.transport.wait')}(h)")
    lines.append(f"{handles}[{op.handle}] = None")
    if op.slot >= 0:
        lines.append(f"{writer.of_registers('values')}[{op.slot}] = h.tensors")
    return [*lines, "h = None"]


_WRITTEN: dict[Handler, Callable[[_StreamWriter, int, BoundStep], list[str]]] = {
    forward: _forward,
    backward: _backward,
    weight: _weight,
    recompute: _recompute,
    post: _post,
    wait: _wait,
}
"""By handler: what writes the same for given operands."""
