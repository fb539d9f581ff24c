"""What the tests of planned expert parallelism run on every rank of a pool of processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedc.compiler import compile as compile_schedule
from schedc.ir.program import Program
from schedc_runtime import Pipeline
from schedc_runtime.moe.router import RouterConfig
from support.reference_runs import spread
from support.runtime_cases import next_token_loss, tokens
from support.segmented_cases import small_moe

ROWS = 1
"""Rows of one microbatch."""


def compiled(schedule: str, sizes: dict[str, int], lines: str, layers: str = "4 dense 1") -> Program:
    """A schedule of the library with a plan of these lines attached, as `schedc compile` gives it."""
    arguments = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    text = f"sched 1\n\nplan tried = {schedule}({arguments}) {{\n  layers {layers}\n{lines}\n}}\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tried.sched"
        path.write_text(text, encoding="utf-8")
        return compile_schedule(f"{path}:tried")


def blocks_for(schedule: str, sizes: dict[str, int]) -> int:
    """As many blocks as stages, and no less than three: a dense one, and two with experts."""
    return max(3, compile_schedule(schedule, **sizes).stages)


def model(balance: float = 1e-2, blocks: int = 4) -> Any:
    """Blocks of which the first is dense; biased routing with an auxiliary loss."""
    routing = RouterConfig(experts=8, top=2, scores="sigmoid", biased=True, balance=balance)
    return small_moe(moe_blocks=blocks - 1, dense_blocks=1, routing=routing)


def batch_of(program: Program, replicas: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return tokens(ROWS * program.microbatches * replicas, seed=seed)


def in_process(schedule: str, sizes: dict[str, int], lines: str, steps: int = 2) -> tuple[Pipeline, list[Tensor]]:
    """All ranks here, cells one after the other."""
    blocks = blocks_for(schedule, sizes)
    program = compiled(schedule, sizes, lines.replace("overlap auto", "overlap off"), f"{blocks} dense 1")
    example, _ = batch_of(program, 1)
    pipe = Pipeline(model(blocks=blocks), program, loss_fn=next_token_loss, in_process=True, example=example)
    return pipe, train(pipe, steps)


def train(pipe: Pipeline, steps: int) -> list[Tensor]:
    """Losses of a few steps of plain gradient descent, each with a batch of its own."""
    losses = []
    for step in range(steps):
        pipe.zero_grad()
        batch, targets = batch_of(pipe.program, pipe.mesh.replicas, seed=step + 1)
        if not pipe._network.in_process:
            batch, targets = (part.chunk(pipe.mesh.replicas)[pipe.replica] for part in (batch, targets))
        losses.append(pipe.step(batch, targets))
        with torch.no_grad():
            for stage in pipe._held():
                for parameter in dict.fromkeys(stage.module.parameters()):
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        pipe.update_biases()
    return losses


def parity(rank: int, world_size: int, cases: list[tuple[str, dict[str, int], str]]) -> list[list[str]]:
    """Per case: names of what differs from all ranks in one process, of rank 0 after some steps; elsewhere []."""
    differing = []
    for case, (wanted, whole) in zip(cases, spread(_reference, cases), strict=True):
        blocks = blocks_for(*case[:2])
        program = compiled(*case, f"{blocks} dense 1")
        example, _ = batch_of(program, 1)
        pipe = Pipeline(model(blocks=blocks), program, loss_fn=next_token_loss, timeout=30, example=example)
        losses = train(pipe, 2)
        state = pipe.full_state_dict()
        pipe.close()
        wrong = [f"loss {n}" for n, pair in enumerate(zip(losses, wanted, strict=True)) if not torch.equal(*pair)]
        wrong += [name for name, value in state.items() if not torch.equal(value, whole[name])]
        if rank == 0 and state.keys() != whole.keys():
            wrong.append("names")
        differing.append(wrong)
    return differing


def _reference(case: tuple[str, dict[str, int], str]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and the whole model's state after the steps, of all ranks in one process."""
    pipe, losses = in_process(*case)
    return losses, pipe.full_state_dict()
