"""Tells failures that only fake tensors have, which keep no values, from failures of the model."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of code that takes a branch, a size or a number from the values of a tensor."""


def fake_only(error: BaseException) -> bool:
    """Whether an operation failed only because fake tensors have no values, or no kernel."""
    return isinstance(error, (*NEEDS_VALUES, UnsupportedOperatorException)) or (
        isinstance(error, RuntimeError) and "grouped_mm" in _frames(error)
    )


def _frames(error: BaseException) -> str:
    names, frame = [], error.__traceback__
    while frame is not None:
        names.append(frame.tb_frame.f_code.co_name)
        frame = frame.tb_next
    return " ".join(names)
