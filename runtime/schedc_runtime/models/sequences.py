"""Token sequences that a small model learns in few steps: what the examples and benchmarks train on."""

from __future__ import annotations

import torch
from torch import Tensor


def counting_sequences(rows: int, tokens: int, seed: int, vocab: int = 128) -> tuple[Tensor, Tensor]:
    """[rows, tokens] int64 counting sequences with random starts and strides, and [rows, tokens] their next tokens."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, vocab, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    sequence = (start + stride * torch.arange(tokens + 1)) % vocab
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
