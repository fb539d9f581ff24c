"""A small GPT, and token sequences that it learns in few steps: what `schedc run` and the examples train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from schedc.ir.plan import Level
from schedc_runtime.data.documents import document_mask, document_positions
from schedc_runtime.recompute.regions import region


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`. tied: the head and the token embedding share one weight."""

    vocab: int = 128
    width: int = 64
    heads: int = 4
    blocks: int = 8
    context: int = 128
    dropout: float = 0.0
    tied: bool = False


class GptAttention(nn.Module):
    """[batch, tokens, width] to the same: causal attention, or as a mask [batch, 1, tokens, tokens] allows.

    Rows of the fused product lie head by head, as query, key and value. So a tensor rank has whole heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.query_key_value(x).view(batch, tokens, -1, 3, self.head_dim)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        joined: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return joined


class GptMlp(nn.Module):
    """[batch, tokens, width] to the same: two products with biases, and a GELU between."""

    recomputed_from = Level.FULL
    """The lowest level that recomputes the MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = region(self.recomputed_from, self._products, x)
        return output

    def _products(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(functional.gelu(self.up(x)))
        return output


class GptBlock(nn.Module):
    """Attention and MLP, each after a norm and around a residual connection. [batch, tokens, width] to the same.

    mask: as of `GptAttention`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = GptAttention(config.width, config.heads)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = GptMlp(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        output: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output


class GPT(nn.Module):
    """Token and position embedding, blocks, norm, head: [batch, tokens] int64 to [batch, tokens, vocab] logits.

    ``documents`` of packed rows, [batch, tokens] int32 as of `schedc_runtime.data.document_positions`, keep documents
    apart: positions begin anew in each, and attention does not cross. Each stage of a pipeline makes its own mask.
    """

    _tp_plan: ClassVar = {
        "token_embedding": "embedding_rowwise",
        "blocks.*.attention.query_key_value": "colwise",
        "blocks.*.attention.projection": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "head": "colwise_gather_output",
    }
    """How tensor ranks split the model, in the styles of Transformers."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([GptBlock(config) for _ in range(config.blocks)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        masks = () if documents is None else (document_mask(documents),)
        if documents is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            positions = document_positions(documents)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x, *masks)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of [batch, tokens, vocab] logits against [batch, tokens] targets."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def counting_sequences(rows: int, tokens: int, seed: int, vocab: int = 128) -> tuple[Tensor, Tensor]:
    """[rows, tokens] int64 counting sequences with random starts and strides, and [rows, tokens] their next tokens."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, vocab, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    sequence = (start + stride * torch.arange(tokens + 1)) % vocab
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
