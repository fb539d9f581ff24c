"""A call of a pipeline as its parts see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.pipeline.state.snapshots import Wanted

CheckFinite = bool | Literal["loss"]
"""What `Pipeline` takes as ``check_finite``."""


class ProgramChoice(Protocol):
    """What runs a step. number: 0 for the pipeline's own program, n for ``others[n - 1]``. name: of its schedule.

    orders: [replicas here][microbatches] how the microbatches of the batch were ordered.
    """

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def orders(self) -> Sequence[Sequence[int]]: ...


class PipelineCall(NamedTuple):
    """A call of `Pipeline.step` or `Pipeline.evaluate`, with the program to run. `Pipeline.step` has the rest.

    gradients: whether they were enabled around the call. snapshot: the state to copy to the host. again: it runs a
    second time, with exact sizes. microbatches: how many there are; None for as many as in ``program``.
    choice: which program runs, where the pipeline has several.
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
    choice: ProgramChoice | None = None

    @property
    def number(self) -> int:
        """The number of the program that runs. Raises `RuntimeFault` for a choice that is none."""
        if self.choice is None:
            return 0
        whole = all(hasattr(self.choice, name) for name in ("name", "orders"))
        if not whole or type(getattr(self.choice, "number", None)) is not int:
            raise RuntimeFault(f"choice={self.choice!r} is no choice of a program", "give `RowLoader.choice`")
        return self.choice.number

    @property
    def orders(self) -> Tensor | None:
        """[replicas here, microbatches] the order of the microbatches, where it was chosen."""
        return None if self.choice is None else torch.tensor(self.choice.orders)

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
