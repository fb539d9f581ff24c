"""Memory of the heads of latent attention, and cosines and sines of their positions, for a kernel and its twin.

`schedc_runtime.kernels.heads` has the letters of the shapes. Nothing here needs Triton.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def rotary_table(x: Tensor, columns: int) -> Tensor:
    """[2, tokens, columns / 2] cosines and sines for x [b, tokens, ...], in the dtype of x and on its device."""
    tokens = x.shape[1]
    table = _table(1 << max(tokens - 1, 0).bit_length(), columns, x.dtype, x.device)
    return table[:, :tokens]


@cache
def _table(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made on the host, which waits for its copy: any stream of the device may read it, and a graph may hold it.

    Real numbers where a mode has fakes, since all blocks share it.
    """
    wide = torch.promote_types(dtype, torch.float32)
    with _disable_current_modes():
        exponents = torch.arange(0, columns, 2, dtype=wide) / columns
        angle = torch.arange(tokens, dtype=wide)[:, None] * 10000.0**-exponents
        return torch.stack((angle.cos(), angle.sin())).to(dtype).to(device)


def by_head(x: Tensor, heads: int) -> Tensor:
    """[b, t, h c] as [b, t, h, c]."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


def memory_of_heads(query: Tensor, pair: Tensor, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """[b, t, h, ...] memory of queries, keys and values. query, pair: [b, t, h, ...]."""
    lengths = (query.shape[-1], query.shape[-1], pair.shape[-1] - plain)
    queries, keys, values = (query.new_empty((*query.shape[:-1], length)) for length in lengths)
    return queries, keys, values


def heads_shapes(query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for queries, keys and values [b, h, t, ...], by query, turned and pair [b, t, ...]."""
    query, pair = by_head(query, heads), by_head(pair, heads)
    queries, keys, values = memory_of_heads(query, pair, plain)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def gradients_of_heads(queries: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for gradients: query, pair [b, t, h, ...] and turned [b, t, r]. queries: [b, t, h, p + r]."""
    batch, tokens, heads, whole = queries.shape
    query = queries.new_empty((batch, tokens, heads, whole))
    pair = queries.new_empty((batch, tokens, heads, whole - columns + values.shape[-1]))
    return query, queries.new_empty((batch, tokens, columns)), pair


def heads_backward_shapes(queries: Tensor, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of query, turned and pair, by those of queries, keys and values [b, h, t, ...]."""
    query, turned, pair = gradients_of_heads(queries.transpose(1, 2), values, columns)
    return query.flatten(-2), turned, pair.flatten(-2)
