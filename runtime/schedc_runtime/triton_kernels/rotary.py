"""Rotary positions in Triton: a program for some heads of all tokens. `schedc_runtime.kernels.rotary` says what.

HALF: half of the columns of a head, and ROOM the power of two that holds it. TILE: heads that a program holds at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"TILE": 16, "num_warps": 4, "enable_fp_fusion": False}
_DIMS = 4
"""Sequences, heads, tokens and columns: the dimensions of x in whose order strides are given."""


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, output, rows, heads, tokens, strides, HALF: tl.constexpr, ROOM: tl.constexpr, BACK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    head, token, batch = row % heads, row // heads % tokens, (row // heads // tokens).to(tl.int64)
    column = tl.arange(0, ROOM)[None, :]
    inside = (row < rows) & (column < HALF)
    of_x = x + batch * strides[0] + head.to(tl.int64) * strides[1] + token.to(tl.int64) * strides[2] + column
    of_cos = cos + batch * strides[3] + head.to(tl.int64) * strides[4] + token.to(tl.int64) * strides[5] + column
    of_sin = sin + batch * strides[6] + head.to(tl.int64) * strides[7] + token.to(tl.int64) * strides[8] + column
    to = output + batch * strides[9] + head.to(tl.int64) * strides[10] + token.to(tl.int64) * strides[11] + column
    dtype = output.dtype.element_ty
    first = tl.load(of_x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(of_x + HALF, mask=inside, other=0.0).to(tl.float32)
    left_sine = tl.load(of_sin, mask=inside, other=0.0).to(tl.float32)
    right_sine = tl.load(of_sin + HALF, mask=inside, other=0.0).to(tl.float32)
    left = (first * tl.load(of_cos, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    right = (second * tl.load(of_cos + HALF, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if BACK:
        left += (second * right_sine).to(dtype).to(tl.float32)
        right -= (first * left_sine).to(dtype).to(tl.float32)
    else:
        left -= (second * left_sine).to(dtype).to(tl.float32)
        right += (first * right_sine).to(dtype).to(tl.float32)
    tl.store(to, left.to(dtype), mask=inside)
    tl.store(to + HALF, right.to(dtype), mask=inside)


def launch_rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Any:
    """[..., d]: as `schedc_runtime.kernels.rotary.rotate_twin`, of heads in at most four dimensions."""
    alike = x.dtype == cos.dtype == sin.dtype and max(cos.dim(), sin.dim()) <= x.dim() <= _DIMS
    if not alike or x.shape[-1] % 2 or x.stride(-1) != 1:
        return NotImplemented
    output = x.new_empty(x.shape) if back else torch.empty_like(x)
    whole = [part.expand(x.shape) for part in (x, cos, sin, output)]
    whole = [part[(None,) * (_DIMS - x.dim())] for part in whole]
    if any(part.stride(-1) != 1 for part in whole) or not output.numel():
        return NotImplemented if output.numel() else output
    _, heads, tokens, columns = whole[0].shape
    rows = output.numel() // columns
    _rotate[(triton.cdiv(rows, OPTIONS["TILE"]),)](
        x, cos, sin, output, rows, heads, tokens, tuple(step for part in whole for step in part.stride()[:3]),
        HALF=columns // 2, ROOM=triton.next_power_of_2(columns // 2), BACK=back, **OPTIONS,
    )  # fmt: skip
    return output
