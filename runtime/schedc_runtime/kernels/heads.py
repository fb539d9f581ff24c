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

_LAUNCHES = "schedc_runtime.triton_kernels.heads"


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> None:
    """Write [..., r] x, whose planes are turned."""
    (first, second), (left, right) = x.chunk(2, -1), out.chunk(2, -1)
    torch.sub(first * cosine, second * sine, out=left)
    torch.add(second * cosine, first * sine, out=right)


def heads_twin(query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [b, h, t, p + r] and values [b, h, t, v]."""
    cosine, sine = rotary_table(query, turned.shape[-1])
    query, pair = by_head(query, heads), by_head(pair, heads)
    queries, keys, values = memory_of_heads(query, pair, plain)
    queries[..., :plain], keys[..., :plain], values[...] = query[..., :plain], pair[..., :plain], pair[..., plain:]
    _turned(query[..., plain:], cosine.unsqueeze(-2), sine.unsqueeze(-2), queries[..., plain:])
    keys[..., plain:] = _of_all_heads(turned, cosine, sine)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def _of_all_heads(turned: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    shared = torch.empty_like(turned)
    _turned(turned, cosine, sine, shared)
    return shared.unsqueeze(-2)


def heads_backward_twin(queries: Tensor, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, turned and pair from those of queries, keys and values [b, h, t, ...]; r = columns."""
    queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
    cosine, sine = rotary_table(queries, columns)
    query, turned, pair = gradients_of_heads(queries, values, columns)
    plain = queries.shape[-1] - columns
    query[..., :plain], pair[..., :plain], pair[..., plain:] = queries[..., :plain], keys[..., :plain], values
    _turned(queries[..., plain:], cosine.unsqueeze(-2), -sine.unsqueeze(-2), query[..., plain:])
    _turned(keys[..., plain:].sum(-2), cosine, -sine, turned)
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
