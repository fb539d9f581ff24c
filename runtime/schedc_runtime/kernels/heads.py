"""Queries, keys and values of latent attention from the results of its products: one operation, and its gradient.

    query, turned, pair  [b, t, h (p + r)], [b, t, r], [b, t, h (p + v)]: a token's queries, the part of its keys that
                         all heads share, and keys and values by head
    result               queries and keys [b, h, t, p + r], values [b, h, t, v]; a token's heads lie side by side

Rotary positions turn the last r columns of queries and keys: the plane of columns i and i + r / 2 by the angle
position * 10000^(-2i / r) (Su et al., 2021, RoFormer). Latent attention is that of DeepSeek-V2 (DeepSeek-AI, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.kernels.library import operation
from schedc_runtime.triton_kernels.latents import (
    by_head,
    gradients_of_heads,
    heads_backward_shapes,
    heads_shapes,
    memory_of_heads,
    rotary_table,
)

_LAUNCHES = "heads"


def heads_twin(query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [b, h, t, p + r] and values [b, h, t, v]."""
    cosine, sine = rotary_table(query, turned.shape[-1]).unsqueeze(-2)
    query, pair = by_head(query, heads), by_head(pair, heads)
    queries, keys, values = memory_of_heads(query, pair, plain)
    half = turned.shape[-1] // 2
    same, first, second = query.split_with_sizes((plain, half, half), -1)
    torch.cat((same, first * cosine - second * sine, second * cosine + first * sine), -1, out=queries)
    same, own = pair.split_with_sizes((plain, values.shape[-1]), -1)
    values.copy_(own)
    first, second = turned.unsqueeze(-2).chunk(2, -1)
    shared = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    torch.cat((same, shared.expand(-1, -1, heads, -1)), -1, out=keys)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def heads_backward_twin(queries: Tensor, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, turned and pair from those of queries, keys and values [b, h, t, ...]; r = columns."""
    queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    cosine, sine = table = rotary_table(queries, columns)
    query, turned, pair = gradients_of_heads(queries, values, columns)
    half, plain = columns // 2, queries.shape[-1] - columns
    same, shared = keys.split_with_sizes((plain, columns), -1)
    torch.cat((same, values), -1, out=pair)
    first, second = shared.sum(-2).chunk(2, -1)
    torch.cat((first * cosine + second * sine, second * cosine - first * sine), -1, out=turned)
    cosine, sine = table.unsqueeze(-2)
    same, first, second = queries.split_with_sizes((plain, half, half), -1)
    torch.cat((same, first * cosine + second * sine, second * cosine - first * sine), -1, out=query)
    return query.flatten(-2), turned, pair.flatten(-2)


latent_heads = operation(
    "latent_heads(Tensor query, Tensor turned, Tensor pair, int heads, int plain) -> (Tensor, Tensor, Tensor)",
    heads_twin,
    f"{_LAUNCHES}:launch_heads",
    heads_shapes,
)
latent_heads_backward = operation(
    "latent_heads_backward(Tensor queries, Tensor keys, Tensor values, int columns) -> (Tensor, Tensor, Tensor)",
    heads_backward_twin,
    f"{_LAUNCHES}:launch_heads_backward",
    heads_backward_shapes,
)


class _LatentHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int) -> Sequence[Tensor]:
        ctx.columns = turned.shape[-1]
        results: tuple[Tensor, Tensor, Tensor] = latent_heads(query, turned, pair, heads, plain)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *latent_heads_backward(*grads, ctx.columns), None, None


def heads_of_latents(
    query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [b, h, t, p + r] and values [b, h, t, v]: see the top. The backward holds none of them."""
    results: tuple[Tensor, Tensor, Tensor] = _LatentHeads.apply(query, turned, pair, heads, plain)  # type: ignore[no-untyped-call]
    return results
