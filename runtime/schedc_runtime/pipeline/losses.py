"""The end of a step: the mean loss on every rank, and which stage made it NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.pipeline.batch import BatchRefused
from schedc_runtime.ranks.control import ControlPlane


class NonFiniteLoss(RuntimeFault):
    """The loss is NaN or infinite. microbatch, stage: the first that produced such a value.

    ``stage`` counts stages; their number ``stages`` itself means the loss function.
    """

    def __init__(self, loss: float, microbatch: int, stage: int, stages: int) -> None:
        self.microbatch, self.stage = microbatch, min(stage, stages - 1)
        where = f"stage {stage} was the first to produce a value that is not finite, for microbatch {microbatch}"
        if stage == stages:
            where = f"all stages produced finite values; the loss function did not, for microbatch {microbatch}"
        super().__init__(
            f"the loss is {loss}: {where}",
            "this step's gradients are spoilt: zero them before the next step",
        )


class Leftovers(Exception):
    """A program ended before everything that it produced was used; the compiler makes no such program."""


def share_loss(
    control: ControlPlane,
    losses: Mapping[int, Tensor],
    executors: Sequence[Executor],
    replicas: int,
    check_finite: bool,
) -> Tensor:
    """The mean of all ranks' ``losses``, a scalar on the CPU; the same bits on every rank.

    losses: scalars by microbatch; those of replica r from ``r * microbatches`` on.
    executors: those of this process, of the step that ends.

    Raises `NonFiniteLoss` on every rank if ``check_finite``, and `BatchRefused` where no rank formed a loss.
    """
    program = executors[0].program
    dtype = str(next(iter(losses.values())).dtype).removeprefix("torch.") if losses else ""
    # A float of any of torch's dtypes is exact in JSON, which Python writes with as many digits as it takes.
    mine = [dtype, {m: float(loss) for m, loss in losses.items()}]
    everyone = control.gather("the end of the step, to share the loss", mine)
    values = {int(m): value for _, part in everyone for m, value in part.items()}
    name = next((name for name, _ in everyone if name), "")
    if not name:
        raise BatchRefused("no rank formed a loss: no targets were given", "pass targets")
    if missing := sorted(set(range(program.microbatches * replicas)) - values.keys()):
        raise Leftovers(f"the program formed no loss for the microbatches {missing}")
    mean = torch.tensor([values[m] for m in sorted(values)], dtype=getattr(torch, name)).mean()  # as `mean_loss`
    if check_finite and not torch.isfinite(mean):
        microbatch, stage = _culprit(control, values, executors)
        raise NonFiniteLoss(float(mean), microbatch, stage, program.stages)
    return mean


def _culprit(control: ControlPlane, losses: Mapping[int, float], executors: Sequence[Executor]) -> tuple[int, int]:
    """The first microbatch with a value that is not finite, and its first such stage; for the loss, the number of
    stages."""
    mine = [
        (forward.microbatch, forward.stage.index)
        for executor in executors
        for forward, probes in executor.registers.probes
        if not all(bool(torch.isfinite(probe)) for probe in probes)
    ]
    everyone: list[Any] = control.gather("naming what is not finite", mine)
    stages = executors[0].program.stages
    culprits = [(microbatch, stage) for part in everyone for microbatch, stage in part]
    microbatches = executors[0].program.microbatches
    culprits += [(m % microbatches, stages) for m, value in losses.items() if not math.isfinite(value)]
    return min(culprits, default=(0, stages))
