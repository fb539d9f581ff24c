"""torchtitan's `pipelining_fn` with a schedule of schedc: `ModelSpec(..., pipelining_fn=pipelining_fn)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from schedc.compiler import compile as compile_schedule
from schedc.ir.program import Program
from schedc_runtime.pipeline.pipeline import Pipeline


class PipelineSchedule:
    """A pipeline as torchtitan's trainer calls a schedule: losses of microbatches add up to the loss of the step.

    loss_fn(output, labels, number of tokens of the step): the sum of a microbatch divided by that number, and facts.

    torchtitan's checkpoints save the parts and their optimizers by name. They do not save ``pipe.steps``, of which
    random numbers are functions: set it when a run of a model with dropout goes on.
    """

    def __init__(self, model: nn.Module, program: Program, loss_fn: Any) -> None:
        self.tokens: Any = None
        self.pipe = Pipeline(model, program, loss_fn=lambda x, y: loss_fn(x, y, self.tokens)[0])

    def step(
        self,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Any] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[Any] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """A training step. arg_mbs, kwarg_mbs, target_mbs: [microbatches] inputs, and labels where the last stage is.

        losses: receives the loss of each microbatch.
        """
        self.tokens = (loss_kwargs or {}).get("global_valid_tokens")
        tensors = {name: [part[name] for part in kwarg_mbs or ()] for name in (kwarg_mbs or [{}])[0]}
        tensors |= {"tokens": [tokens for (tokens,) in arg_mbs or ()]}
        batch = {name: torch.cat(parts) for name, parts in tensors.items()} if arg_mbs else None
        count = float(self.pipe.program.microbatches)  # the pipeline's own loss is a mean over microbatches
        self.pipe.step(batch, torch.cat(list(target_mbs)) if target_mbs else None, scale=count)
        if losses is not None:
            assert self.pipe.result is not None
            losses.extend(self.pipe.result.losses)


def pipelining_fn(
    model: nn.Module, *, parallel_dims: Any, training: Any, parallelism: Any, device: Any, loss_fn: Any, **_: Any
) -> tuple[PipelineSchedule, list[nn.Module], bool, bool]:
    """What torchtitan's `pipeline_llm` gives: the schedule, the parts here, whether they have the first and last stage.

    ``pipeline_parallel_schedule`` of the configuration is a name of `schedc list`, or the path of a file.
    """
    whole: Any = model.to_empty(device=device)
    whole.init_weights(buffer_device=device)
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    program = compile_schedule(parallelism.pipeline_parallel_schedule, P=parallel_dims.pp, M=microbatches)
    schedule = PipelineSchedule(model, program, loss_fn)
    held = {stage.index for place in schedule.pipe.places for stage in schedule.pipe.held(place)}
    for part in schedule.pipe.modules:  # they have their values: the trainer's initialization changes nothing
        part.to_empty = part.init_weights = lambda **_: None  # type: ignore[method-assign,assignment]
    return schedule, list(schedule.pipe.modules), 0 in held, program.stages - 1 in held
