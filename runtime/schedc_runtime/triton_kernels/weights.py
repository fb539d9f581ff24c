"""Weights of choices, their gradients, and the gradient of the auxiliary loss, in Triton.

`schedc_runtime.moe.router` and `schedc_runtime.moe.balance` say what. Divisions round as IEEE says.

weights             a program for each token
weights_backward    a program for each token: an expert's gradient is that of the choice that fell on it
balance             one program: sums over experts in float64
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False}
_LANES = 256
"""Numbers of a row that a warp holds."""


@triton.jit
def _sum(values):
    return tl.sum(values, 0) + 1e-20


@triton.jit
def _of_quotient(gradient, values):
    sums = _sum(values)
    whole = tl.sum(-gradient * tl.div_rn(tl.div_rn(values, sums), sums), 0)
    return tl.div_rn(gradient, sums) + whole


@triton.jit
def _weights(
    scores, index, weight, shares, scale, row_stride, EXPERTS: tl.constexpr, TOP: tl.constexpr,
    NORMALISE: tl.constexpr, ROOM: tl.constexpr, TOP_ROOM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TOP_ROOM)
    number = tl.load(index + token * TOP + slot, mask=slot < TOP, other=0)
    value = tl.load(scores + token * row_stride + number, mask=slot < TOP, other=0.0)
    if NORMALISE:
        value = tl.div_rn(value, _sum(value))
    tl.store(weight + token * TOP + slot, value * scale, mask=slot < TOP)
    if shares is not None:
        expert = tl.arange(0, ROOM)
        row = tl.load(scores + token * row_stride + expert, mask=expert < EXPERTS, other=0.0)
        tl.store(shares + token * EXPERTS + expert, tl.div_rn(row, _sum(row)), mask=expert < EXPERTS)


@triton.jit
def _weights_backward(
    gradient, of_shares, scores, index, result, scale, row_stride, EXPERTS: tl.constexpr, TOP: tl.constexpr,
    NORMALISE: tl.constexpr, ROOM: tl.constexpr, TOP_ROOM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TOP_ROOM)
    expert = tl.arange(0, ROOM)
    number = tl.load(index + token * TOP + slot, mask=slot < TOP, other=0)
    given = tl.load(gradient + token * TOP + slot, mask=slot < TOP, other=0.0) * scale
    if NORMALISE:
        chosen = tl.load(scores + token * row_stride + number, mask=slot < TOP, other=0.0)
        given = _of_quotient(given, chosen)
    fallen = (number[None, :] == expert[:, None]) & (slot < TOP)[None, :]
    total = tl.sum(tl.where(fallen, given[None, :], 0.0), 1)
    if of_shares is not None:
        inside = expert < EXPERTS
        row = tl.load(scores + token * row_stride + expert, mask=inside, other=0.0)
        total = _of_quotient(tl.load(of_shares + token * EXPERTS + expert, mask=inside, other=0.0), row) + total
    tl.store(result + token * EXPERTS + expert, total, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["replicas"])
def _balance(
    everyone, total, gradient, loss, balance, balance_rest, scale, scale_rest, replicas, EXPERTS: tl.constexpr,
    TOP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, ROOM)
    chosen, shares = tl.zeros((ROOM,), dtype=tl.float64), tl.zeros((ROOM,), dtype=tl.float64)
    for replica in range(replicas):
        row = everyone + replica * 2 * EXPERTS + expert
        chosen += tl.load(row, mask=expert < EXPERTS, other=0.0)
        shares += tl.load(row + EXPERTS, mask=expert < EXPERTS, other=0.0)
    whole = tl.maximum(tl.sum(chosen, 0), 1.0)
    factor = tl.zeros((ROOM,), dtype=tl.float64) + balance + balance_rest
    times = (tl.zeros((ROOM,), dtype=tl.float64) + scale + scale_rest) * replicas
    slope = chosen / whole * (EXPERTS * TOP) / whole * factor
    added = tl.sum(slope * shares, 0)
    if total is not None:
        added += tl.load(total)
    tl.store(loss, added)
    tl.store(gradient + expert, (slope * times).to(gradient.dtype.element_ty), mask=expert < EXPERTS)


def _near(rows: Tensor) -> Tensor:
    """[N, n] the same, whose columns lie side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _facts(scores: Tensor, top: int, normalise: bool) -> dict[str, Any]:
    room = triton.next_power_of_2(scores.shape[1])
    warps = min(8, max(1, room // _LANES))
    sizes = {"EXPERTS": scores.shape[1], "TOP": top, "ROOM": room, "TOP_ROOM": triton.next_power_of_2(top)}
    return sizes | {"NORMALISE": normalise, "num_warps": warps} | OPTIONS


def launch_weights(scores: Tensor, index: Tensor, normalise: bool, scale: float, shared: bool) -> Any:
    """[[N, top] weights, and [N, experts] shares if ``shared``]: as the twin, of scores [N, experts] in float32."""
    if scores.dtype is not torch.float32:
        return NotImplemented
    results = [scores.new_empty(index.shape), *([scores.new_empty(scores.shape)] if shared else [])]
    if len(scores):
        near = _near(scores)
        _weights[(len(scores),)](
            near, index.contiguous(), results[0], results[1] if shared else None, scale, near.stride(0),
            **_facts(scores, index.shape[1], normalise),
        )  # fmt: skip
    return results


def launch_weights_backward(
    gradient: Tensor, of_shares: Tensor | None, scores: Tensor, index: Tensor, normalise: bool, scale: float
) -> Any:
    """[N, experts] the gradient of scores: as the twin, in float32."""
    if scores.dtype is not torch.float32:
        return NotImplemented
    result, near = scores.new_empty(scores.shape), _near(scores)
    if len(scores):
        _weights_backward[(len(scores),)](
            gradient.contiguous(), None if of_shares is None else of_shares.contiguous(), near, index.contiguous(),
            result, scale, near.stride(0), **_facts(scores, index.shape[1], normalise),
        )  # fmt: skip
    return result


def _halves(number: float) -> tuple[float, float]:
    """A number as the sum of two in float32, which is what Triton takes."""
    first = torch.tensor(number, dtype=torch.float32).item()
    return first, number - first


def launch_balance(
    sums: Tensor, everyone: Tensor, total: Tensor | None, top: int, balance: float, scale: float
) -> tuple[Tensor, Tensor]:
    """([experts] gradient of ``sums``, [] float64 loss added to ``total``): as the twin."""
    replicas, _, experts = everyone.shape
    gradient, loss = torch.empty_like(sums), everyone.new_empty(())
    room = triton.next_power_of_2(experts)
    _balance[(1,)](
        everyone.contiguous(), total, gradient, loss, *_halves(balance), *_halves(scale), replicas,
        EXPERTS=experts, TOP=top, ROOM=room, num_warps=min(8, max(1, room // _LANES)), **OPTIONS,
    )  # fmt: skip
    return gradient, loss
