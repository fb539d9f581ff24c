"""Trains models of many shapes in pipelines, and compares each with the model as it is.

Lists, dicts, attributes, nested lists, two lists, skips, asserts, a block twice, split points inside of blocks. Each
runs under zbh1 (P = 4), 1f1b (P = 2) and dualpipev (P = 2), all ranks in this process, float64. Each case has:

    right        loss and gradients agree with autograd of a copy of the whole model to 1e-12
    difference   the largest relative difference of a gradient or a loss
    units        of each stage under zbh1
    refused      the reason, where the shape was refused
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import RuntimeFault

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 6, 8, 11


class Block(nn.Module):
    """A residual block with an inner sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Named(nn.Module):
    """Blocks in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({name: Block() for name in ("first", "second", "third", "fourth")})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x


class Attributes(nn.Module):
    """Blocks as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(VOCABULARY, WIDTH)
        self.layer1, self.layer2, self.layer3, self.layer4 = (Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer4(self.layer3(self.layer2(self.layer1(self.stem(tokens))))))


class SeveralLists(nn.Module):
    """Two lists with elements in turns, and a third list behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attentions = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tail = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + mlp(attention(x).relu())
        for block in self.tail:
            x = block(x)
        return x


class NestedLists(nn.Module):
    """A list of lists of blocks, with what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(3))
        self.between = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for stage, norm in zip(self.stages, self.between, strict=True):
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
            x = norm(x)
        return x


class EncoderDecoder(nn.Module):
    """Two towers; the decoder reads what the encoder gives in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_out = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device, dtype=torch.float64
        )
        memory = self.embed(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed_out(tokens.flip(1))
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return x


class Skips(nn.Module):
    """A U: what goes down is read again on the way up, the first last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.down, self.up = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, kept = self.embed(tokens), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop())
        return x


class SlicesAndAsserts(nn.Module):
    """A parameter that is sliced, an assertion on sizes, a write to a slice, a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        assert length <= self.positions.shape[0], "too long"
        x = self.embed(tokens) + self.positions[:length]
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = x.clone()
                x[:, 0] = 0
                with torch.no_grad():
                    scale = x.abs().mean(dim=(1, 2), keepdim=True)
                x = x / scale
        logits: Tensor = self.head(x.reshape(rows * length, -1))
        return logits.reshape(rows, length, -1)


class BlockTwice(nn.Module):
    """A block that runs twice, in the same stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number in (0, 0, 1, 2, 3, 4):
            x = self.blocks[number](x)
        return x


class Deep(nn.Module):
    """Two towers of blocks, cut inside of their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x


class Shape(NamedTuple):
    """A model, and the split points of two and of four stages, where the cut is not left to schedc."""

    make: Callable[[], nn.Module]
    two: tuple[str, ...] | None = None
    four: tuple[str, ...] | None = None


SHAPES = {
    "dict": Shape(Named),
    "attributes": Shape(Attributes),
    "several lists": Shape(SeveralLists),
    "nested lists": Shape(NestedLists),
    "encoder and decoder": Shape(EncoderDecoder),
    "skips": Shape(Skips),
    "slices and asserts": Shape(SlicesAndAsserts),
    "a block twice": Shape(BlockTwice, ("blocks.2",), ("blocks.1", "blocks.2", "blocks.3")),
    "split points inside blocks": Shape(
        Deep, ("decoder.0.mlp",), ("encoder.1.mlp", "decoder.0", "decoder.2.mlp.2")
    ),
}  # fmt: skip


def measure() -> dict[str, Any]:
    """All shapes, each as the module describes."""
    torch.set_num_threads(1)
    cases = [case(name) for name in SHAPES]
    return {"right": sum(one["right"] for one in cases), "cases": cases}


def case(name: str) -> dict[str, Any]:
    """One shape under all three schedules."""
    entry: dict[str, Any] = {"case": name, "right": False, "difference": 0.0, "units": [], "refused": ""}
    shape = SHAPES[name]
    for schedule, ranks, points in (("zbh1", 4, shape.four), ("1f1b", 2, shape.two), ("dualpipev", 2, shape.four)):
        try:
            difference, units = _difference(shape.make, schedule, ranks, points)
        except RuntimeFault as error:
            entry["refused"] = f"{schedule}: {error}"
            return entry
        entry["difference"] = max(entry["difference"], difference)
        entry["units"] = entry["units"] or units
    entry["right"] = entry["difference"] <= 1e-12
    return entry


def _difference(
    make: Callable[[], nn.Module], schedule: str, ranks: int, points: tuple[str, ...] | None
) -> tuple[float, list[list[str]]]:
    torch.manual_seed(0)
    model = make().double()
    whole = copy.deepcopy(model)
    program = schedc.compile(schedule, P=ranks, M=4)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    target = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    pipe = Pipeline(
        model, program, loss_fn=_loss, cut=Cut(split_points=points), in_process=True, example=tokens
    )  # fmt: skip
    loss = pipe.step(tokens, target)
    expected = _loss(whole(tokens), target)
    expected.backward()
    differences = [float((loss - expected.detach()).abs() / expected.detach().abs())]
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in whole.named_parameters():
        mine = grads[name]
        if mine is None or parameter.grad is None:
            differences.append(0.0 if mine is parameter.grad else float("inf"))
        else:
            differences.append(float((mine - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(min=1e-9)))
    pipe.close()
    return max(differences), [list(units) for units in pipe.partition.blocks]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target.view(-1, 1, 1)) ** 2).mean()
