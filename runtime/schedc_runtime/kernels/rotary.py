"""Rotary positions as Hugging Face's models write them: an operation for both directions, and its twin.

    x          [..., d]     heads
    cos, sin   [..., d]     of the angle of each column, of shapes that broadcast to that of x
    result     [..., d]     x cos + turn(x) sin, where turn takes columns (a, b) to (-b, a), two halves of d / 2

Rounding is that of torch's operations, one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedc_runtime.kernels.library import operation


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., d]: see the top."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotary_backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., d] the gradient of x."""
    first, second = (gradient * sin).chunk(2, -1)
    half = first.shape[-1]
    sums = gradient.new_empty(gradient.shape)  # rows in order, as autograd leaves them
    sums[..., :half] = second
    sums[..., half:] = -first
    return sums.add_(gradient * cos)


def rotate_twin(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """[..., d] `rotary` of x, or with ``back`` `rotary_backward` of a gradient x."""
    return rotary_backward(x, cos, sin) if back else rotary(x, cos, sin)


rotate = operation(
    "rotate(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    rotate_twin,
    "rotary:launch_rotate",
)
