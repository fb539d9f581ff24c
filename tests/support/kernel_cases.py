"""Arguments for the operations of our own, by kernel: what twins and kernels are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.moe.counts import ABSENT, Shape
from support.route_cases import ROUTE_CASES

Args = tuple[Any, ...]
NAN = float("nan")


def _swiglu_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """gate, up, bias, ends, scale: halves of one tensor, and tensors of their own with more than a block of columns."""
    both = torch.randn(5, 72, dtype=torch.float32).to(device, dtype)
    yield *both.chunk(2, -1), None, None, None
    gate, up = (torch.randn(2, 3, 1040).to(device, dtype) for _ in range(2))
    yield gate, up, torch.randn(1, 2080).to(device, dtype), None, torch.randn(2, 3).to(device)
    ends = torch.tensor((2, 2, 6), dtype=torch.int32, device=device)
    many = torch.randn(6, 80).to(device, dtype)
    yield *many.chunk(2, -1), torch.randn(3, 80).to(device, dtype), ends, torch.randn(6).to(device)
    empty = torch.randn(0, 16).to(device, dtype)
    yield *empty.chunk(2, -1), None, None, None
    yield *empty.chunk(2, -1), torch.randn(3, 16).to(device, dtype), 0 * ends, torch.randn(0).to(device)


def _swiglu(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    yield from _swiglu_inputs(dtype, device)


def _swiglu_backward(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for gate, up, bias, ends, scale in _swiglu_inputs(dtype, device):
        halves = torch.full((*gate.shape[:-1], 2 * gate.shape[-1]), NAN).to(device, dtype).chunk(2, -1)
        grad = torch.randn(gate.shape).to(device, dtype)
        scale_grad = None if scale is None else torch.full_like(scale, NAN)
        yield grad, gate, up, bias, ends, scale, *halves, scale_grad
    yield grad.new_ones(1, 1).expand(3, 4), *torch.randn(3, 8).to(device, dtype).chunk(2, -1), None, None, None, *(
        torch.full((3, 4), NAN).to(device, dtype) for _ in range(2)
    ), None  # fmt: skip


def _add_gradients(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    shapes = [(5,), (3, 1024), (7, 11), (0, 4), (2048,), (), (2, 40, 24), (33, 64)]
    for count in (1, len(shapes), 70):
        totals = [torch.randn(shapes[number % len(shapes)]).to(device, dtype) for number in range(count)]
        yield totals, [torch.randn_like(total) for total in totals]
    turned = torch.randn(6, 40, 24).to(device, dtype).mT
    yield [turned, turned.clone()], [torch.randn_like(turned), torch.randn_like(turned).contiguous()]


def _permute(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    rows, gates = torch.randn(5, 1040).to(device, dtype), torch.randn(5).to(device)
    ids = torch.randint(0, 9, (5, 3)).to(device, torch.int16)
    at = torch.randint(0, 5, (7,)).to(device)
    blank = (torch.rand(7) > 0.6).to(device)
    width = 1040 * dtype.itemsize
    buffer = torch.full((7, width + 16), 7, dtype=torch.uint8, device=device)
    ends = (0, width, width, width + 4, width + 8, width + 14)
    parts = [buffer[:, first:last] for first, last in zip(ends[::2], ends[1::2], strict=True)]
    views = [parts[0].view(dtype), parts[1].view(torch.float32).view(7), parts[2].view(torch.int16)]
    yield [rows, gates, ids], [at] * 3, [blank, None, blank], [0, 0, -2], views
    yield [rows[:0]], [at], [None], [3], [torch.zeros(7, 1040).to(device, dtype)]
    yield [rows.view(5, 2, 520)], [at[:0]], [None], [0], [rows.new_empty(0, 2, 520)]
    yield [ids[:, 0], gates], [at, at[:2]], [None, None], [0, 0], [ids.new_zeros(7), gates.new_zeros(2)]


def _combine(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    def bags(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device)

    summands = torch.randn(11, 1040).to(device, dtype)
    for rows in (5, 3):  # the last bag is read, or nobody reads it
        yield summands, [torch.randint(0, 11, (20,)).to(device)], [bags(0, 3, 3, 9, 15)], [rows]
    levels = [torch.randperm(11).to(device), bags(4, 1, 2, 3, 0), bags(0, 2, 1)]
    yield summands, levels, [bags(0, 2, 4, 5, 8), bags(0, 2, 4), bags(0, 2)], [5, 3, 2]
    yield summands[:, 0], levels[:1], [bags(0, 2, 4, 5, 8)], [5]
    yield summands[:0], [bags()], [bags(0, 0)], [2]


def _choose(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    if dtype is not torch.float32:
        return
    for experts, *sizes in ((8, 2, 1, 1), (24, 3, 4, 2), (8, 2, 8, 3)):
        scores = torch.randn(9, experts)
        scores[:2] = 0.5
        scores[1, ::2], scores[1, 1::2] = -0.0, 0.0
        scores[2, 1], scores[2, 2] = NAN, -float("inf")
        scores[3:6] = (2 * scores[3:6]).round()
        for bias in (None, torch.randn(experts).to(device)):
            yield scores.to(device), bias, *sizes


def _count(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    if dtype is not torch.float32:
        return
    for tokens, k, shape in (
        (40, 2, Shape(4, 2, 2)),
        (33, 3, Shape(8, 1, 4, capacity=0)),
        (33, 2, Shape(8, 2, 2, method="hierarchical")),
        (0, 2, Shape(4, 1, 2)),
    ):
        weight = torch.rand(tokens, k).to(device)
        index = torch.rand(tokens, shape.experts).argsort(-1)[:, :k].to(device)
        if shape.capacity is not None:
            most = int(index.flatten().bincount().max())
            yield index, weight, replace(shape, capacity=most - 1).numbers
            shape = replace(shape, capacity=most)
        yield index, weight, shape.numbers
        if tokens:
            marked = index.clone()
            marked[2] = ABSENT
            if shape.capacity is not None:
                marked[3] = ABSENT - 1 - marked[3]
                yield marked.clone(), weight, shape.numbers
            marked[0, 0], marked[1, 1] = marked[0, 1], shape.experts + 3
            weight[1, 0] = NAN
            yield marked, weight, shape.numbers


def _weighted_backward(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for columns, weighted in ((1040, True), (24, False)):
        unweighted, rows = (torch.randn(5, columns).to(device, dtype) for _ in range(2))
        yield unweighted, rows, torch.rand(5).to(device), weighted
    yield unweighted[:1].expand(5, -1), rows.t().contiguous().t(), torch.rand(5).to(device), True
    yield unweighted[:0], rows[:0], torch.rand(0).to(device), True


def _norm_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """x, a gradient and a weight: more than a block of columns, and more rows than a tile, some with strides."""
    for shape, strided in (((2, 3, 1100), False), ((130, 40), True), ((0, 16), False)):
        x, grad = (torch.randn(*shape[:-1], 2 * shape[-1]).to(device, dtype) for _ in range(2))
        given = [both.chunk(2, -1)[1] if strided else both[..., : shape[-1]].contiguous() for both in (x, grad)]
        yield *given, torch.randn(shape[-1]).to(device, dtype)
    yield *given, None


def _rms_rows(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for x, _, weight in _norm_inputs(dtype, device):
        yield from ((x, weight, 0.5, early) for early in (False, True))


def _rms_rows_backward(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for x, grad, weight in _norm_inputs(dtype, device):
        yield from ((grad, x, weight, torch.rand(*x.shape[:-1], 1).to(device), early) for early in (False, True))


def _rms_rows_weight(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for args in _rms_rows_backward(dtype, device):
        if args[2] is not None:
            yield args


_HEADS = ((2, 3, 18, 6, 4, 5), (1, 2, 3, 8, 2, 8), (2, 0, 2, 4, 2, 4))
"""Sequences, tokens, heads, and columns of a head: plain, half of those with positions, values."""


def _latent_heads(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for batch, tokens, heads, plain, half, value in _HEADS:
        query = torch.randn(batch, tokens, heads * (plain + 2 * half)).to(device, dtype)
        latent = torch.randn(batch, tokens, 7 + 2 * half).to(device, dtype)
        yield (
            query,
            latent[..., 7:],
            torch.randn(batch, tokens, heads * (plain + value)).to(device, dtype),
            heads,
            plain,
        )


def _latent_heads_backward(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    for batch, tokens, heads, plain, half, value in _HEADS:
        widths = (plain + 2 * half, plain + 2 * half, value)
        queries, keys, values = (torch.randn(batch, heads, tokens, width).to(device, dtype) for width in widths)
        yield queries, keys.transpose(1, 2).contiguous().transpose(1, 2), values.mT.contiguous().mT, 2 * half


def _rotate(dtype: torch.dtype, device: torch.device) -> Iterator[Args]:
    """Heads beside each other or one behind the other, parts of wider rows, one head alone, and none."""
    cos, sin = (torch.randn(2, 1, 5, 12).to(device, dtype) for _ in range(2))
    x = torch.randn(2, 5, 7, 20).to(device, dtype)[..., 8:].transpose(1, 2)
    for back in (False, True):
        yield x, cos, sin, back
        yield x.contiguous(), cos[:1], sin[0, 0], back
        yield x[1, 2], cos[0, 0], sin[0, 0], back
    yield x[:0], cos[:0], sin[:0], False


CASES: dict[str, Callable[[torch.dtype, torch.device], Iterator[Args]]] = {
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "add_gradients": _add_gradients,
    "permute": _permute,
    "combine": _combine,
    "choose": _choose,
    "count": _count,
    "weighted_backward": _weighted_backward,
    "rms_rows": _rms_rows,
    "rms_rows_backward": _rms_rows_backward,
    "rms_rows_weight": _rms_rows_weight,
    "rotate": _rotate,
    "latent_heads": _latent_heads,
    "latent_heads_backward": _latent_heads_backward,
    **ROUTE_CASES,
}
"""By kernel: arguments of its twin."""
