"""Heads of latent attention in Triton: a program for a token and some heads. `schedc_runtime.kernels.heads` says what.

HALF: half of the columns with positions. TILE: heads that a program holds at once. The rooms are powers of two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.latents import heads_backward_shapes, heads_shapes, rotary_table
from schedc_runtime.triton_kernels.swiglu import as_rows

OPTIONS = {"TILE": 16, "num_warps": 4, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def _turn(first, second, cosine, sine, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    left = (first * cosine).to(dtype).to(tl.float32) - (second * sine).to(dtype).to(tl.float32)
    right = (second * cosine).to(dtype).to(tl.float32) + (first * sine).to(dtype).to(tl.float32)
    return left.to(dtype), right.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _heads(  # type: ignore[no-untyped-def]
    query, turned, pair, table, queries, keys, values, tokens, heads, query_row, turned_row, pair_row, table_row,
    PLAIN: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr, PLAIN_ROOM: tl.constexpr, HALF_ROOM: tl.constexpr,
    VALUE_ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    plain, half, value = tl.arange(0, PLAIN_ROOM), tl.arange(0, HALF_ROOM), tl.arange(0, VALUE_ROOM)
    dtype = queries.dtype.element_ty
    from_query = query + row * query_row + head * (PLAIN + 2 * HALF)
    from_pair = pair + row * pair_row + head * (PLAIN + VALUE)
    to = (row * heads + head) * (PLAIN + 2 * HALF)
    inside = (head < heads) & (plain < PLAIN)[None, :]
    tl.store(queries + to + plain, tl.load(from_query + plain, mask=inside), mask=inside)
    tl.store(keys + to + plain, tl.load(from_pair + plain, mask=inside), mask=inside)
    inside = (head < heads) & (value < VALUE)[None, :]
    to_values = values + (row * heads + head) * VALUE + value
    tl.store(to_values, tl.load(from_pair + PLAIN + value, mask=inside), mask=inside)
    angle = table + tl.program_id(0) % tokens * HALF + half
    cosine = tl.load(angle, mask=half < HALF, other=0.0).to(tl.float32)
    sine = tl.load(angle + table_row, mask=half < HALF, other=0.0).to(tl.float32)
    inside = (head < heads) & (half < HALF)[None, :]
    first = tl.load(from_query + PLAIN + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(from_query + PLAIN + HALF + half, mask=inside, other=0.0).to(tl.float32)
    left, right = _turn(first, second, cosine[None, :], sine[None, :], dtype)
    tl.store(queries + to + PLAIN + half, left, mask=inside)
    tl.store(queries + to + PLAIN + HALF + half, right, mask=inside)
    shared = turned + row * turned_row + half
    first = tl.load(shared, mask=half < HALF, other=0.0).to(tl.float32)
    second = tl.load(shared + HALF, mask=half < HALF, other=0.0).to(tl.float32)
    left, right = _turn(first, second, cosine, sine, dtype)
    tl.store(keys + to + PLAIN + half, tl.broadcast_to(left[None, :], (TILE, HALF_ROOM)), mask=inside)
    tl.store(keys + to + PLAIN + HALF + half, tl.broadcast_to(right[None, :], (TILE, HALF_ROOM)), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _heads_backward(  # type: ignore[no-untyped-def]
    queries, keys, values, table, query, turned, pair, tokens, heads, strides, table_row,
    PLAIN: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr, PLAIN_ROOM: tl.constexpr, HALF_ROOM: tl.constexpr,
    VALUE_ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    batch, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    plain, half, value = tl.arange(0, PLAIN_ROOM), tl.arange(0, HALF_ROOM), tl.arange(0, VALUE_ROOM)
    dtype = query.dtype.element_ty
    angle = table + token * HALF + half
    cosine = tl.load(angle, mask=half < HALF, other=0.0).to(tl.float32)
    sine = -tl.load(angle + table_row, mask=half < HALF, other=0.0).to(tl.float32)
    firsts = tl.zeros((TILE, HALF_ROOM), dtype=tl.float32)
    seconds = tl.zeros((TILE, HALF_ROOM), dtype=tl.float32)
    for start in range(0, heads, TILE):
        head = (start + tl.arange(0, TILE)).to(tl.int64)[:, None]
        of_queries = queries + batch * strides[0] + head * strides[1] + token * strides[2]
        of_keys = keys + batch * strides[3] + head * strides[4] + token * strides[5]
        of_values = values + batch * strides[6] + head * strides[7] + token * strides[8]
        to_query = query + (row * heads + head) * (PLAIN + 2 * HALF)
        to_pair = pair + (row * heads + head) * (PLAIN + VALUE)
        inside = (head < heads) & (plain < PLAIN)[None, :]
        tl.store(to_query + plain, tl.load(of_queries + plain, mask=inside), mask=inside)
        tl.store(to_pair + plain, tl.load(of_keys + plain, mask=inside), mask=inside)
        inside = (head < heads) & (value < VALUE)[None, :]
        tl.store(to_pair + PLAIN + value, tl.load(of_values + value, mask=inside), mask=inside)
        inside = (head < heads) & (half < HALF)[None, :]
        first = tl.load(of_queries + PLAIN + half, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(of_queries + PLAIN + HALF + half, mask=inside, other=0.0).to(tl.float32)
        left, right = _turn(first, second, cosine[None, :], sine[None, :], dtype)
        tl.store(to_query + PLAIN + half, left, mask=inside)
        tl.store(to_query + PLAIN + HALF + half, right, mask=inside)
        firsts += tl.load(of_keys + PLAIN + half, mask=inside, other=0.0).to(tl.float32)
        seconds += tl.load(of_keys + PLAIN + HALF + half, mask=inside, other=0.0).to(tl.float32)
    first = tl.sum(firsts, 0).to(dtype).to(tl.float32)
    second = tl.sum(seconds, 0).to(dtype).to(tl.float32)
    left, right = _turn(first, second, cosine, sine, dtype)
    tl.store(turned + row * 2 * HALF + half, left, mask=half < HALF)
    tl.store(turned + row * 2 * HALF + HALF + half, right, mask=half < HALF)


def launch_heads(query: Tensor, turned: Tensor, pair: Tensor, heads: int, plain: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values [b, h, t, ...] of [b, t, ...]: as `schedc_runtime.kernels.heads.heads_twin`."""
    results = heads_shapes(query, turned, pair, heads, plain)
    table = rotary_table(query, turned.shape[-1])
    rows = [as_rows(x) for x in (query, turned, pair)]
    if turned.numel():
        _heads[(len(rows[0]), triton.cdiv(heads, OPTIONS["TILE"]))](
            *rows, table, *results, query.shape[1], heads, *(x.stride(0) for x in rows), table.stride(0),
            **_sizes(plain, turned.shape[-1] // 2, results[2].shape[-1]), **OPTIONS,
        )  # fmt: skip
    return results


def launch_heads_backward(queries: Tensor, keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [b, t, ...] of query, turned and pair: as `schedc_runtime.kernels.heads.heads_backward_twin`."""
    results = heads_backward_shapes(queries, keys, values, columns)
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values)]
    batch, heads, tokens, whole = queries.shape
    table = rotary_table(results[1], columns)
    if results[1].numel():
        _heads_backward[(batch * tokens,)](
            *given, table, *results, tokens, heads, tuple(s for x in given for s in x.stride()[:3]), table.stride(0),
            **_sizes(whole - columns, columns // 2, values.shape[-1]), **OPTIONS,
        )  # fmt: skip
    return results


def _sizes(plain: int, half: int, value: int) -> dict[str, Any]:
    rooms = {f"{name}_ROOM": triton.next_power_of_2(max(size, 1)) for name, size in
             (("PLAIN", plain), ("HALF", half), ("VALUE", value))}  # fmt: skip
    return {"PLAIN": plain, "HALF": half, "VALUE": value, **rooms}
