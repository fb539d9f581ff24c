"""Queries, keys and values of latent attention from the results of its products: one operation, and its gradient.

    query, turned, pair  [b, t, h (p + r)], [b, t, r], [b, t, h (p + v)]: a token's queries, the part of its keys that
                         all heads share, and keys and values by head
    result               queries and keys [b, h, t, p + r], values [b, h, t, v]; a token's heads lie side by side

Rotary positions turn the last r columns of queries and keys: the plane of columns i and i + r / 2 by the angle
position * 10000^(-2i / r) (Su et al., 2021, RoFormer). Latent attention is that of DeepSeek-V2 (DeepSeek-AI, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.kernels.library import operation

_LAUNCHES = "schedc_runtime.triton_kernels.heads"


def rotary_table(x: Tensor, columns: int) -> Tensor:
    """[2, tokens, columns / 2] cosines and sines for x [b, tokens, ...], in the dtype of x and on its device."""
    tokens = x.shape[1]
    table = _table(1 << max(tokens - 1, 0).bit_length(), columns, x.dtype, x.device)
    return table[:, :tokens]


@cache
def _table(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made on the host, which waits for its copy: any stream of the device may read it, and a graph may hold it."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, columns, 2, dtype=wide) / columns
    angle = torch.arange(tokens, dtype=wide)[:, None] * 10000.0**-exponents
    return torch.stack((angle.cos(), angle.sin())).to(dtype).to(device)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> None:
    """Write [..., r] x, whose planes are turned."""
    (first, second), (left, right) = x.chunk(2, -1), out.chunk(2, -1)
    torch.sub(first * cosine, second * sine, out=left)
    torch.add(second * cosine, first * sine, out=right)


def heads_twin(query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [b, h, t, p + r] and values [b, h, t, v]."""
    cosine, sine = rotary_table(query, turned.shape[-1])
    query, pair = _by_head(query, heads), _by_head(pair, heads)
    queries, keys, values = _empty(query, turned, pair, plain)
    queries[..., :plain], keys[..., :plain], values[...] = query[..., :plain], pair[..., :plain], pair[..., plain:]
    _turned(query[..., plain:], cosine.unsqueeze(-2), sine.unsqueeze(-2), queries[..., plain:])
    keys[..., plain:] = _of_all_heads(turned, cosine, sine)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def _of_all_heads(turned: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    shared = torch.empty_like(turned)
    _turned(turned, cosine, sine, shared)
    return shared.unsqueeze(-2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


def _empty(query: Tensor, turned: Tensor, pair: Tensor, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """[b, t, h, ...] memory of queries, keys and values. query, pair: [b, t, h, ...]."""
    lengths = (query.shape[-1], query.shape[-1], pair.shape[-1] - plain)
    queries, keys, values = (query.new_empty((*query.shape[:-1], length)) for length in lengths)
    return queries, keys, values


def heads_shapes(query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for queries, keys and values [b, h, t, ...], by query, turned and pair [b, t, ...]."""
    query, pair = _by_head(query, heads), _by_head(pair, heads)
    queries, keys, values = _empty(query, turned, pair, plain)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def heads_backward_twin(queries: Tensor, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, turned and pair from those of queries, keys and values [b, h, t, ...]; r = columns."""
    queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
    cosine, sine = rotary_table(queries, columns)
    query, turned, pair = _gradients(queries, values, columns)
    plain = queries.shape[-1] - columns
    query[..., :plain], pair[..., :plain], pair[..., plain:] = queries[..., :plain], keys[..., :plain], values
    _turned(queries[..., plain:], cosine.unsqueeze(-2), -sine.unsqueeze(-2), query[..., plain:])
    _turned(keys[..., plain:].sum(-2), cosine, -sine, turned)
    return query.flatten(-2), turned, pair.flatten(-2)


def _gradients(queries: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for gradients: query, pair [b, t, h, ...] and turned [b, t, r]. queries: [b, t, h, p + r]."""
    batch, tokens, heads, whole = queries.shape
    query = queries.new_empty((batch, tokens, heads, whole))
    pair = queries.new_empty((batch, tokens, heads, whole - columns + values.shape[-1]))
    return query, queries.new_empty((batch, tokens, columns)), pair


def heads_backward_shapes(queries: Tensor, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of query, turned and pair, by those of queries, keys and values [b, h, t, ...]."""
    query, turned, pair = _gradients(queries.transpose(1, 2), values, columns)
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
