"""torchtitan's `pipelining_fn` with a schedule of schedc: `ModelSpec(..., pipelining_fn=pipelining_fn)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import schedc
import schedc_runtime


class Schedule:
    """A pipeline as torchtitan's trainer calls a schedule: losses of microbatches add up to that of the step."""

    def __init__(self, model: nn.Module, program: Any, loss_fn: Any) -> None:
        self.tokens: Any = None
        self.pipe = schedc_runtime.Pipeline(model, program, loss_fn=lambda x, y: loss_fn(x, y, self.tokens)[0])

    def step(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, loss_kwargs=None, **_) -> None:
        self.tokens = (loss_kwargs or {}).get("global_valid_tokens")
        tensors = {name: [part[name] for part in kwarg_mbs] for name in (kwarg_mbs or [{}])[0]}  # such as positions
        tensors |= {"tokens": [tokens for (tokens,) in arg_mbs or ()]}
        batch = arg_mbs and {name: torch.cat(parts) for name, parts in tensors.items()}
        count = float(self.pipe.program.microbatches)  # the pipeline's own loss is a mean over microbatches
        self.pipe.step(batch, target_mbs and torch.cat(target_mbs), scale=count)
        if losses is not None:
            losses.extend(self.pipe.result.losses)


def pipelining_fn(model, *, parallel_dims, training, parallelism, device, loss_fn, **_) -> Any:
    model.to_empty(device=device).init_weights(buffer_device=device)
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    program = schedc.compile(parallelism.pipeline_parallel_schedule, P=parallel_dims.pp, M=microbatches)
    schedule = Schedule(model, program, loss_fn)
    held = {stage.index for place in schedule.pipe.places for stage in schedule.pipe.held(place)}
    for part in schedule.pipe.modules:  # they have their values: the trainer's initialization changes nothing
        part.to_empty = part.init_weights = lambda **_: None
    return schedule, list(schedule.pipe.modules), 0 in held, program.stages - 1 in held
