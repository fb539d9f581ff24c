"""Streams of steps whose microbatches have several shapes: each call runs the code of its microbatch's.

A stage runs the code of one input signature at a time, and microbatches alternate on it, also inside a cell. So each
call begins by letting the stage take the shape of its microbatch (`StageBase.take_shape`). A step of one shape runs
another stream, which takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from schedc.ir.program import InstructionKind
from schedc_runtime.execute.code import BoundStep, Handler
from schedc_runtime.execute.handlers import HANDLERS
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.execute.operands import ComputeOperands, PairOperands
from schedc_runtime.execute.registers import Registers


def in_shapes(steps: Sequence[BoundStep]) -> list[BoundStep]:
    """The steps of a stream, each of which lets its stage take a shape where it computes."""
    return [step._replace(handler=_handler_of(step)) for step in steps]


def _handler_of(step: BoundStep) -> Handler:
    if isinstance(step.operands, PairOperands):
        return _cell
    return _behind_shape(step.handler) if isinstance(step.operands, ComputeOperands | MicroStep) else step.handler


@cache
def _behind_shape(handler: Handler) -> Handler:
    """A handler that computes, behind the choice of a shape; also when it is called again."""

    def call(registers: Registers, op: Any) -> bool | None:
        op.stage.take_shape(op.microbatch)
        return handler(registers, op)

    return call


def _cell(registers: Registers, op: PairOperands) -> None:
    """CELL on whole stages, each op in its own shape."""
    for kind, operands in zip(op.kinds, (op.first, op.second), strict=True):
        _behind_shape(HANDLERS[InstructionKind(kind)])(registers, operands)
