"""Steps that a graph may hold: with experts behind padded or bounded routes, dense, and with a head in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline
from schedc_runtime.capture.check import CaptureReport
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss
from schedc_runtime.testing import capturable
from support.expert_cases import batch_of, blocks_for, compiled, model
from support.runtime_cases import next_token_loss, small_gpt, tokens

SCHEDULES: Mapping[str, dict[str, int]] = {
    name: {"P": 2, "M": 4} for name in ("1f1b", "zbh1", "zbv", "dualpipev", "dualpipe", "interleaved_1f1b")
}
EXPERTS = "  experts 8 top 2\n  topology nodes 1 x 2\n"
ROUTES = {
    "padded": "  alltoall flat\n  capacity 1.25 drop probs\n",
    "bounded": "  alltoall flat\n  sizes bounded 4\n",
    "tight": "  alltoall flat\n  sizes bounded 1.25\n",
    "exact": "  alltoall flat\n",
}
"""Lines of a plan by the kind of its routes."""
SMALL = {"P": 1, "M": 2}
"""Sizes of a step for tests."""
KINDS = ("padded", "bounded", "dense", "chunked")
"""Kinds of steps that a graph can hold."""


def pipeline(kind: str, schedule: str, sizes: dict[str, int] | None = None, **options: Any) -> Pipeline:
    """A pipeline of a kind, all ranks here, in float32: CPU kernels of grouped products take no other."""
    sizes = sizes or SCHEDULES[schedule]
    if kind in ROUTES:
        blocks = blocks_for(schedule, sizes)
        program = compiled(schedule, sizes, EXPERTS + ROUTES[kind], f"{blocks} dense 1")
        whole: Any = model(blocks=blocks)
    else:
        program = compile_schedule(schedule, **sizes)
        whole = small_gpt(max(4, program.stages), **options.pop("config", {}))
    loss = ChunkedLoss(head="head", chunk=5) if kind == "chunked" else options.pop("loss_fn", next_token_loss)
    torch.manual_seed(0)
    example, _ = tokens(program.microbatches)
    return Pipeline(whole.float(), program, loss_fn=loss, in_process=True, example=example, **options)


def data(pipe: Pipeline, number: int) -> tuple[Tensor, Tensor]:
    """Batch and targets of a step, [rows, tokens] each."""
    return batch_of(pipe.program, pipe.mesh.replicas, seed=number + 1)


def zeroed(pipe: Pipeline) -> None:
    """Zero the gradients, and keep them."""
    for parameter in pipe.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def judged(pipe: Pipeline, between: Callable[[Pipeline], None] = zeroed) -> CaptureReport:
    """What the check says of steps with other data. between: what a trainer does with gradients before each."""

    def step(number: int) -> None:
        between(pipe)
        pipe.step(*data(pipe, number))

    return capturable(step)


def on_ranks(rank: int, world_size: int, schedules: list[str]) -> list[list[str]]:
    """What the check says of a dense model on this rank, by schedule: one line for each finding."""
    return [[str(each) for each in _on_rank(schedule).findings] for schedule in schedules]


def _on_rank(schedule: str) -> CaptureReport:
    program = compile_schedule(schedule, **SCHEDULES[schedule])
    whole, example = small_gpt(max(4, program.stages)).float(), tokens(program.microbatches)[0]
    pipe = Pipeline(whole, program, loss_fn=next_token_loss, timeout=30, example=example)
    report = pipe.explain_capture(*(tokens(program.microbatches, seed=seed) for seed in (1, 2)))
    pipe.close()
    return report
