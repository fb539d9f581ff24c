"""Kernels that the checks of `kernel_facts` must refuse: one does not compile, and one has no room in registers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def annotated(x: Any, output, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(output + at, tl.load(x + at))


@triton.jit  # type: ignore[untyped-decorator]
def crowded(x, output, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + at).to(tl.float32)
    tl.store(output + at, numbers - tl.max(numbers))
