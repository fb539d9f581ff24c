"""A call of a pipeline as its parts see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.pipeline.state.snapshots import Wanted

CheckFinite = bool | Literal["loss"]
"""What `Pipeline` takes as ``check_finite``."""


class PipelineCall(NamedTuple):
    """A call of `Pipeline.step` or `Pipeline.evaluate`, with the program to run. `Pipeline.step` has the rest.

    gradients: whether they were enabled around the call. snapshot: what it copies to the host. again: it runs a
    second time, with exact sizes. microbatches: how many there are; None for as many as in ``program``.
    """

    name: str
    program: Program
    scale: float = 1.0
    accumulate: int = 1
    outputs: bool = False
    trace: bool = False
    profile: bool = False
    gradients: bool = True
    snapshot: Wanted = False
    again: bool = False
    microbatches: int | None = None

    @property
    def microbatch_count(self) -> int:
        """The number of microbatches of the call. Raises `RuntimeFault` for what is none."""
        asked = self.program.microbatches if self.microbatches is None else self.microbatches
        if type(asked) is not int or asked < 1:
            raise RuntimeFault(f"microbatches={asked!r} is no number of microbatches", "give a whole number from 1 on")
        return asked

    @property
    def training(self) -> bool:
        return self.name == "step"


class StepWatch(Protocol):
    """What looks at the training steps of a pipeline."""

    def begin(self, executors: Sequence[Executor]) -> None:
        """The executors of all places here are ready for their first instruction."""
        ...

    def end(self, step: int) -> None:
        """All ranks have run the training step with a number, counted from 1. It may be a collective."""
        ...


class Auditor(Protocol):
    """What `Pipeline` takes as ``audit``."""

    def watch(self, pipe: Any) -> StepWatch:
        """Begin to audit a `Pipeline`. A collective of all its ranks."""
        ...
