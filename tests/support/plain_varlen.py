"""Stands in for torch's kernel of documents of any lengths (`varlen_attn`) on a CPU: attention run by run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional


def run_by_run(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, key_begins: Tensor, scale: float | None, back: int
) -> Tensor:
    """[T, heads, d]. query, key, value: [tokens, heads, d]. begins, key_begins: where runs begin, and the end.

    The last query of a run attends to its last key, and to ``back`` keys before it, or to all where it is below 0.
    """
    parts = []
    for run, keys in zip(_runs(begins), _runs(key_begins), strict=True):
        tokens, there = run.stop - run.start, keys.stop - keys.start
        rows, columns = torch.arange(tokens)[:, None] + there - tokens, torch.arange(there)
        mask = (rows >= columns) & ((rows - columns <= back) if back >= 0 else True)
        q, k, v = (each.transpose(0, 1)[None] for each in (query[run], key[keys], value[keys]))
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


def _runs(begins: Tensor) -> list[slice]:
    return [slice(*pair) for pair in pairwise(begins.tolist())]


@torch.library.custom_op("schedc_tests::run_by_run", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, key_begins: Tensor, scale: float | None, back: int
) -> Tensor:
    return run_by_run(query, key, value, begins, key_begins, scale, back)


@_forward.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Keys of no run get NaN: a kernel may leave their gradients as they were in memory."""
    *three, begins, key_begins = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in three]
        result = run_by_run(*leaves, begins, key_begins, *ctx.rest)
        gradients = torch.autograd.grad(result, leaves, gradient)
    for each in gradients[1:]:
        each[int(key_begins[-1]) :] = torch.nan
    return *gradients, None, None, None, None


_forward.register_autograd(_backward, setup_context=_keep)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, key_begins: Tensor, most: int, most_keys: int, *,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    assert begins.dtype is key_begins.dtype is torch.int32
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert query.shape[0] % most == 0
    return _forward(query, key, value, begins, key_begins, scale, window_size[0])


@contextmanager
def plain_kernel() -> Iterator[None]:
    """Let attentions call the kernel on a CPU, in float64."""
    here = "schedc_runtime.tensor_parallel"
    with (
        mock.patch("torch.nn.attention.varlen.varlen_attn", _kernel),
        mock.patch(f"{here}.varlen.kernel_takes", return_value=True),
        mock.patch(f"{here}.context.kernel_takes", return_value=True),
    ):
        yield
