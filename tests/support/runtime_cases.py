"""What the runtime's tests run on every rank of a pool of processes: importable, with JSON in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc.compiler import compile as compile_schedule
from schedc.ir.program import Program
from schedc_runtime import Pipeline
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.parity.reference import Reference, reference_step
from schedc_runtime.partition.example import arguments
from schedc_runtime.pipeline.agree.batch import split
from support.short_search import search_shortly_on_ranks

torch.set_num_threads(1)
search_shortly_on_ranks()
CPU = torch.device("cpu")
VOCAB = 32


def small_gpt(blocks: int = 4, **config: Any) -> GPT:
    """The same weights on every rank, in float64."""
    torch.manual_seed(0)
    return GPT(GPTConfig(width=16, heads=2, blocks=blocks, vocab=VOCAB, **config)).double()


def model_for(program: Program, **config: Any) -> GPT:
    """`small_gpt` with a block for every stage."""
    return small_gpt(max(4, program.stages), **config)


def tokens(rows: int, length: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, VOCAB, (rows, length), generator=generator),
        torch.randint(0, VOCAB, (rows, length), generator=generator),
    )


def oracle(
    pipe: Pipeline, batch: Any, targets: Any, program: Program | None = None, device: torch.device = CPU
) -> Reference:
    """The serial reference of a step of ``pipe`` (or of ``program`` on its stages); its gradients are left alone."""
    program = program or pipe.program
    count = program.microbatches
    microbatches = [arguments(part) for part in split(batch, count, device)]
    return reference_step(pipe.partition, program, microbatches, split(targets, count, device), next_token_loss)


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def plain(model: nn.Module, batch: Tensor, targets: Tensor, microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole model by autograd alone, on the mean over microbatches."""
    model.zero_grad()
    losses = [
        next_token_loss(model(x), y)
        for x, y in zip(batch.chunk(microbatches), targets.chunk(microbatches), strict=True)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)  # a tied weight under each of its names
    grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def differences(pipe: Pipeline, loss: Tensor, expected: Reference) -> list[str]:
    """What is not bitwise as expected, of the part that this process holds."""
    wrong = [] if torch.equal(loss, expected.loss) else [f"loss {loss.item()} not {expected.loss.item()}"]
    for name, parameter in pipe.named_parameters():  # in one process both copies of a stage are here
        grad, wanted = parameter.grad, expected.grads.get(name)
        if grad is None or wanted is None:
            wrong += [] if grad is wanted else [f"{name}: {'none' if grad is None else 'one'} is there"]
        elif not torch.equal(grad, wanted):
            wrong.append(name)
    return wrong


def check_parity(pipe: Pipeline, model: nn.Module, rows: int) -> list[str]:
    """One step against the serial reference (bitwise) and plain autograd (float64 rounding); the names held."""
    batch, targets = tokens(rows)
    plain_loss, plain_grads = plain_of(model, batch, targets, pipe.program.microbatches)
    loss = pipe.step(batch, targets)
    assert differences(pipe, loss, oracle(pipe, batch, targets)) == []
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=1e-14)
    for name, grad in gradients(pipe).items():
        torch.testing.assert_close(grad, plain_grads[name], rtol=1e-9, atol=1e-13)
    return sorted(gradients(pipe))


def plain_of(model: nn.Module, batch: Tensor, targets: Tensor, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """`plain` on a model equal to ``model``, whose layers belong to a pipeline by now."""
    assert isinstance(model, GPT)
    twin = GPT(model.config).double()
    twin.load_state_dict(model.state_dict())
    return plain(twin, batch, targets, count)


def parity(rank: int, world_size: int, cases: list[tuple[str, dict[str, int]]], tied: bool = False) -> list[list[str]]:
    names = []
    for schedule, sizes in cases:
        program = compile_schedule(schedule, **sizes)
        model = model_for(program, tied=tied)
        rows = 2 * program.microbatches
        pipe = Pipeline(model, program, loss_fn=next_token_loss, timeout=30, example=tokens(rows)[0])
        names.append(check_parity(pipe, model, rows))
        pipe.close()
    return names
