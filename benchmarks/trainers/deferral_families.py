"""Tiny models of Hugging Face families as models of one tensor, for the measure of what waits for W."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainers.families import FAMILIES, LENGTHS, ROWS, VOCABULARY, Family, batch, make

NAMES = ["llama", "gemma3", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba", "bert", "vit", "t5"]


class OfOneTensor(nn.Module):
    """A model of a family that takes tokens [rows, tokens] or images, and returns its logits."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.model, self.taken = make(family._replace(dtype=torch.float32)), list(batch(family, LENGTHS[0], False))

    def forward(self, x: Tensor) -> Tensor:
        """The logits; an encoder and its decoder get the same tokens."""
        result: Any = self.model(**dict.fromkeys(self.taken, x))
        return result.logits  # type: ignore[no-any-return]


def _sample(family: Family) -> Tensor:
    """Tokens or images, other ones at each call."""
    like = next(iter(batch(family, LENGTHS[0], False).values()))
    if like.is_floating_point():
        return torch.randn(ROWS, *like.shape[1:])
    return torch.randint(3, VOCABULARY, like.shape)


def cases() -> dict[str, tuple[Any, Any, torch.dtype | None]]:
    """By name: the model, an input, and the type of autocast, as in `trainers.deferral`."""
    kinds = {"": None, "_autocast": torch.bfloat16}
    return {
        f"{name}{suffix}": (partial(OfOneTensor, FAMILIES[name]), partial(_sample, FAMILIES[name]), dtype)
        for name in NAMES
        for suffix, dtype in kinds.items()
    }
