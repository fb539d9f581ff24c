"""Trains a Llama on batches of 64 lengths, and asks what a length costs when it is new.

32 layers, width 512, P = 2 (1f1b, both ranks in this process), 4 rows. Two cycles through the same lengths:

    over_one_length   processor time of the first cycle, in which each length is new, over that of the second
    recordings        how often the model ran on fake tensors, the recording of the example included
    new_ms            processor time of the first cycle beyond the second, per length, in ms
    seconds           processor time of both cycles
    right             loss and gradients of the last length are, bit by bit, those of a pipeline that knows it alone
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import schedc
from schedc_runtime import Pipeline

LAYERS, WIDTH, ROWS, VOCABULARY = 32, 512, 4, 256
FIRST, LENGTHS = 65, tuple(range(66, 193, 2))
"""The length of the example, and 64 others up to 192."""


def measure() -> dict[str, Any]:
    """Both cycles, as the module describes."""
    torch.set_num_threads(1)
    model = make()
    alone = copy.deepcopy(model)
    pipe = pipeline(model, FIRST)
    step(pipe, FIRST)  # the first step of a process costs more, whatever the length
    seconds = [cycle(pipe) for _ in range(2)]
    return {
        "over_one_length": round(seconds[0] / seconds[1], 3),
        "recordings": pipe.partition.records.recordings,
        "new_ms": round(1e3 * (seconds[0] - seconds[1]) / len(LENGTHS), 1),
        "seconds": [round(each, 1) for each in seconds],
        "right": same(pipe, pipeline(alone, LENGTHS[-1])),
    }


def make() -> Any:
    """The model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=VOCABULARY, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def pipeline(model: Any, length: int) -> Pipeline:
    """Both ranks, cut by a batch of this length."""
    program = schedc.compile("1f1b", P=2, M=2)
    return Pipeline(model, program, loss_fn=loss_fn, in_process=True, example={"input_ids": tokens(length)})


def tokens(length: int) -> Tensor:
    """[rows, length]"""
    return torch.randint(0, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(length))


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    """[] the mean loss of a microbatch. targets: [rows, length]."""
    return functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def step(pipe: Pipeline, length: int) -> Tensor:
    """One step on a batch of this length, with fresh gradients."""
    pipe.zero_grad()
    batch = tokens(length)
    return pipe.step({"input_ids": batch}, batch)


def cycle(pipe: Pipeline) -> float:
    """Processor seconds of a step on each length."""
    start = time.process_time()
    for length in LENGTHS:
        step(pipe, length)
    return time.process_time() - start


def same(pipe: Pipeline, other: Pipeline) -> bool:
    """Whether two pipelines of the same weights do the same on the last length."""
    losses = [step(each, LENGTHS[-1]) for each in (pipe, other)]
    pairs = zip(pipe.parameters(), other.parameters(), strict=True)
    return torch.equal(*losses) and all(
        a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs
    )
