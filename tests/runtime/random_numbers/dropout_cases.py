"""Models that draw random numbers in many ways, their serial training by autograd, and the same in a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from schedc.compiler import compile as compile_schedule
from schedc.ir.program import Program
from schedc_runtime import Pipeline, named_random

VOCAB = 11
SEED = 7


class Attention(nn.Module):
    """Dropout as a function, on the weights of an attention without heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = functional.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.2, self.training)
        output: Tensor = self.out(weights @ v)
        return output


class Block(nn.Module):
    """One dropout module, called twice. reentrant: the kind of torch's checkpoint around; None without a checkpoint."""

    def __init__(self, width: int, dropout: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(width), Attention(width), dropout
        self.mlp, self.reentrant = nn.Linear(width, width), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-untyped-call]
        return result

    def inner(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        output: Tensor = x + self.dropout(functional.gelu(self.mlp(x)))
        return output


class Drawing(nn.Module):
    """Draws in blocks, by functions between blocks, by `rand_like` and by a feature dropout.

    shared: all blocks have one dropout module.
    """

    def __init__(self, blocks: int = 4, width: int = 8, shared: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        common = nn.Dropout(0.1)
        self.embedding, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(
            [Block(width, common if shared else nn.Dropout(0.1), reentrant) for _ in range(blocks)]
        )
        self.last = nn.Dropout1d(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = functional.dropout(self.embedding(tokens), 0.15, self.training)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2 == 0:
                x = x + 0.1 * torch.rand_like(x)
        x = functional.dropout(x, 0.25, self.training)
        logits: Tensor = self.head(self.last(x))
        return logits


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def noisy_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss that draws, too."""
    return loss_fn(functional.dropout(logits, 0.1), targets)


def drawing(**options: Any) -> Drawing:
    """The same weights each time, in float64."""
    torch.manual_seed(0)
    return Drawing(**options).double()


def batch_of(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB, (2, rows, 5), generator=generator)
    return tokens, targets


def serial(model: nn.Module, microbatches: int, steps: int = 2, loss: Any = loss_fn) -> dict[str, Tensor]:
    """Losses, and weights after some steps of AdamW: autograd of the whole model, without any stage."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = batch_of(microbatches, step)
        parts = zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True)
        for number, (x, y) in enumerate(parts):
            with named_random(model, seed=SEED, step=step, microbatch=number):
                part = loss(model(x), y)
                (part / microbatches).backward()
            losses.append(part.detach())
        optimizer.step()
    means = torch.stack(losses).reshape(steps, microbatches).mean(1)
    return {"losses": means, **{name: p.detach() for name, p in model.named_parameters()}}


def piped(
    model: nn.Module, program: Program, steps: int = 2, loss: Any = loss_fn, first: int = 0, **options: Any
) -> dict[str, Tensor]:
    """The same in a pipeline, with other seeds of torch's before each step. first: the step to begin with."""
    pipe = Pipeline(model, program, loss_fn=loss, seed=SEED, **options)
    pipe.steps = first
    optimizer, losses = torch.optim.AdamW(list(pipe.parameters()), 1e-2), []
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        losses.append(pipe.step(*batch_of(program.microbatches, step)))
        optimizer.step()
    values = {name: p.detach() for name, p in pipe.named_parameters()}
    pipe.close()
    return {"losses": torch.stack(losses), **values}


def differing(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of the values that are not the same, bit by bit."""
    return sorted(name for name in mine if not torch.equal(mine[name], expected[name]))


def on_processes(rank: int, world_size: int, cases: list[tuple[str, dict[str, int]]]) -> list[list[str]]:
    """By case, what differs on this rank from autograd of the whole model."""
    programs = [compile_schedule(name, **sizes) for name, sizes in cases]
    return [
        differing(piped(drawing(shared=True), program), serial(drawing(shared=True), program.microbatches))
        for program in programs
    ]
