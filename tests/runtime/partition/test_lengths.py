"""Batches of changing sizes: what a model makes of a size is that of each batch, and few sizes are recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.plan import Plan
from schedc_runtime import ChunkedLoss, Cut, Pipeline
from schedc_runtime.errors import BoundaryError
from schedc_runtime.partition import Partition, partition
from schedc_runtime.partition.boundary import infer_boundaries
from support.runtime_cases import gradients, small_gpt, tokens
from support.sweeps import swept

pytestmark = pytest.mark.slow

WIDTH, VOCABULARY = 8, 11
SIZES = ((4, 6), (4, 9), (4, 12), (8, 8), (2, 1), (3, 21))
"""Rows and lengths; 8 is also the width. The first is that of the example."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Any = 1) -> Tensor:
        factor = scale() if callable(scale) else getattr(scale, "length", scale)
        factor = factor[0] if isinstance(factor, (tuple, list)) else factor
        return torch.tanh(self.linear(x)) * factor


class Model(nn.Module):
    """Blocks, and ``between`` them code that reads sizes: between(model, x [rows, length, width], length)."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.between = nn.Embedding(VOCABULARY, WIDTH), between
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.table = nn.Parameter(torch.randn(16, WIDTH))
        self.register_buffer("waves", torch.randn(64, WIDTH))
        self.names = {str(number): number / 4 for number in range(1, 40)}
        self.seen: list[int] = []

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = self.between(self, x, tokens.shape[1]) if number == 2 else block(x)
        return x


def _keeps(model: Any, x: Tensor, t: int) -> Tensor:
    model.seen.append(t)
    return x + len(model.seen) * 0


def _chunks(x: Tensor, t: int) -> Tensor:
    return torch.cat([part * (number + 1) for number, part in enumerate(x.split(4, 1))], 1) + t


BETWEEN: dict[str, tuple[Callable[..., Any], int]] = {
    "half": (lambda m, x, t: torch.cat([x[:, : t // 2] * 2, x[:, t // 2 :]], 1), 4),
    "positions": (lambda m, x, t: x + torch.arange(t).view(1, -1, 1) / t, 4),
    "mask": (lambda m, x, t: x + torch.ones(t, t).tril(t - 6) @ x, 4),
    "table of waves": (lambda m, x, t: x + m.waves[:t] + m.waves[-t:], 4),
    "division": (lambda m, x, t: x * (1 / t) + t**-0.5, 4),
    "product of floats": (lambda m, x, t: x * (0.1 * t * 3) + math.floor(t * 0.7 / 0.3), 9),
    "root": (lambda m, x, t: x / math.sqrt(t), 9),
    "loop": (lambda m, x, t: torch.stack([x[:, i] * i for i in range(t)], 1), 9),
    "rows": (lambda m, x, t: torch.stack([row * i for i, row in enumerate(x)]), 7),
    "text": (lambda m, x, t: x * m.names[f"{t}"] + m.names.get(str(t), 1) + len(f"{t:>4d} {x.shape}"), 9),
    "dict": (lambda m, x, t: x * {6: 1.0, 9: 2.0}.get(t, 3.0), 9),
    "is an int": (lambda m, x, t: x * 2 if isinstance(t, int) and t > 10 else x, 8),
    "is exactly an int": (lambda m, x, t: x * 2 if type(t) is int and t > 10 else x, 9),
    "is a symbol": (lambda m, x, t: x * 2 if hasattr(t, "node") else x, 9),
    "is true": (lambda m, x, t: x * 2 if (t > 10) is True else x * (3 if (x.shape[0] == 4) is False else 5), 8),
    "parity": (lambda m, x, t: x * 2 if t % 2 else x, 8),
    "square": (lambda m, x, t: x * 2 if t == WIDTH else x + (x.shape[0] == t), 7),
    "chunks": (lambda m, x, t: _chunks(x, t), 9),
    "memory": (lambda m, x, t: x + x.stride(0) + x.numel() // t + x.untyped_storage().nbytes(), 4),
    "kept": (lambda m, x, t: setattr(m, "length", t) or x + m.length, 9),
    "values": (lambda m, x, t: x * 2 if (torch.arange(t) < 10).all() else x, 8),
    "handed to a block": (lambda m, x, t: m.blocks[2](x, t // 3 + 1), 4),
    "handed as a shape": (lambda m, x, t: m.blocks[2](x, x.shape[1:]), 4),
    "handed in a truth": (lambda m, x, t: m.blocks[2](x, t > 10), 8),
    "handed in an object": (lambda m, x, t: m.blocks[2](x, SimpleNamespace(length=t)), 9),
    "handed in a closure": (lambda m, x, t: m.blocks[2](x, lambda: t + 1), 9),
    "filled": (lambda m, x, t: x.new_full((x.shape[0], 1, 1), t) + x, 4),
}  # fmt: skip
"""Code, and how many recordings the 6 batches of `SIZES` take: with symbols, and without."""


def outputs(parts: Partition, tokens: Tensor) -> Any:
    infer_boundaries(parts, (tokens,))
    values: Any = parts.bind((tokens,))
    for module in parts.modules:
        values = module(*values)
    return values


@pytest.mark.filterwarnings("ignore:Model sets")
@pytest.mark.sweep
@pytest.mark.parametrize("name", swept([*BETWEEN], [*BETWEEN][::7]))
def test_a_recording_holds_for_the_sizes_that_it_says(name: str) -> None:
    between, recordings = BETWEEN[name]
    parts = partition(model := Model(between), 2, example=torch.zeros(SIZES[0], dtype=torch.int64))
    for rows, length in SIZES:
        tokens = torch.arange(rows * length).view(rows, length) % VOCABULARY
        assert torch.equal(outputs(parts, tokens), model(tokens)), (rows, length)
    assert parts.records.recordings == recordings


def test_a_table_ends_where_it_ends() -> None:
    """Beyond the end of a table that was long enough for all lengths so far, a model fails as without a pipeline."""
    parts = partition(Model(lambda m, x, t: x + m.table[:t]), 2, example=torch.zeros(2, 5, dtype=torch.int64))
    for length in (6, 7, 16):
        outputs(parts, torch.zeros(2, length, dtype=torch.int64))
    for length in (17, 18, 17):
        with pytest.raises(BoundaryError, match=r"(?s)fails on inputs of the shapes .*m\.table\[:t\]"):
            outputs(parts, torch.zeros(2, length, dtype=torch.int64))
    assert parts.records.recordings == 2 + 3 * 2


def test_what_a_model_keeps_is_plain() -> None:
    """Code that keeps a size finds a number there, that of its last recording."""
    model = Model(_keeps)
    parts = partition(model, 2, example=torch.zeros(2, 5, dtype=torch.int64))
    for length in (6, 7):
        outputs(parts, torch.zeros(2, length, dtype=torch.int64))
    assert [(type(length), length) for length in model.seen] == [(int, length) for length in (5, 6, 6, 7, 7)]


class Towers(nn.Module):
    """An encoder and a decoder whose inputs have lengths of their own, and an image of any size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.patches = nn.Conv2d(1, WIDTH, 3, stride=2)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(1))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(1))

    def forward(self, image: Tensor, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
        memory = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=hidden)
        x = self.embed(tokens) + torch.arange(tokens.shape[1]).view(1, -1, 1) / tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=memory.dtype)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return x


def _image(rows: int, high: int, wide: int, length: int) -> dict[str, Any]:
    images = torch.linspace(0, 1, rows * high * wide, dtype=torch.float64).view(rows, 1, high, wide)
    return {"image": images, "tokens": torch.arange(rows * length).view(rows, length) % VOCABULARY}


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target.view(-1, 1, 1)) ** 2).mean()


TEXTS: list[Any] = [tokens(*sizes)[0] for sizes in ((8, 6), (8, 9), (8, 16))]
IMAGES: list[Any] = [_image(*sizes) for sizes in ((4, 9, 9, 5), (4, 11, 13, 6), (4, 14, 12, 9))]
Way = tuple[str, Callable[[], nn.Module], Sequence[Any], Any, dict[str, Any], int]
WAYS: dict[str, Way] = {
    "dropout": ("zbh1", partial(small_gpt, 2, dropout=0.1), TEXTS, _squares, {}, 4),
    "segments": ("zbv", small_gpt, TEXTS, _squares, {"cut": Cut(segmented=True)}, 4),
    "slices": ("1f1b", partial(small_gpt, 2), TEXTS, _squares, {"plan": Plan(slices=(2, 2))}, 8),
    "head": ("1f1b", partial(small_gpt, 2), TEXTS, ChunkedLoss("head", chunk=5), {}, 4),
    "two inputs": ("1f1b", lambda: Towers().double(), IMAGES, _squares, {}, 4),
}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", swept([*WAYS], ["segments"]))
def test_steps_have_the_bits_of_a_pipeline_that_knows_one_length(name: str) -> None:
    schedule, make, batches, loss_fn, options, recordings = WAYS[name]

    def pipeline(batch: Any) -> Pipeline:
        program = schedc.compile(schedule, P=2, M=2)
        return Pipeline(make(), program, loss_fn=loss_fn, in_process=True, example=batch, **options)

    def results(pipe: Pipeline, batch: Any) -> list[Any]:
        rows = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
        targets = batch if name == "head" else torch.linspace(-1, 1, rows, dtype=torch.float64)
        pipe.zero_grad()
        return [pipe.step(batch, targets), pipe.evaluate(batch, targets), *gradients(pipe).values()]

    pipe = pipeline(batches[0])
    for batch in (*batches[1:], batches[0]):
        alone = pipeline(batch)
        alone.steps = pipe.steps
        pairs = list(zip(results(pipe, batch), results(alone, batch), strict=True))
        assert [torch.equal(*pair) for pair in pairs] == [True] * len(pairs)
        alone.close()
    assert pipe.partition.records.recordings == recordings
    pipe.close()
