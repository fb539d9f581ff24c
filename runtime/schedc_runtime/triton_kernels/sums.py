"""Sums of gradients in Triton: a program for each block of a total. `schedc_runtime.kernels.sums` says what."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedc_runtime.triton_kernels.numbers import veiled

PAIRS = 64
"""Pairs of a launch. Their addresses are arguments of the kernel, and no table of them is uploaded."""
OPTIONS = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNED = 16


@triton.jit  # type: ignore[untyped-decorator]
def _forward(totals, summands, starts, counts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    total, summand, start, count = totals[0], summands[0], starts[0] >> 4, counts[0] >> 4
    for pair in tl.static_range(1, len(totals)):
        if block >= starts[pair] >> 4:
            total, summand, start, count = totals[pair], summands[pair], starts[pair] >> 4, counts[pair] >> 4
    at = tl.cast(block - start, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    whole = (tl.cast(count, tl.int64) >> 4) << 4  # a multiple of 16 has masks by vectors
    inside = at < whole
    added = tl.load(total + at, mask=inside).to(tl.float32) + tl.load(summand + at, mask=inside).to(tl.float32)
    tl.store(total + at, added.to(total.dtype.element_ty), mask=inside)
    rest = whole + tl.arange(0, 16)
    inside = (rest < count) & (whole // BLOCK == block - start)
    added = tl.load(total + rest, mask=inside).to(tl.float32) + tl.load(summand + rest, mask=inside).to(tl.float32)
    tl.store(total + rest, added.to(total.dtype.element_ty), mask=inside)


def launch_sums(totals: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
    """Add each of ``summands`` [...] to its total [...]. The kernel adds what lies alike in memory, torch the rest."""
    pairs = [(total, summand) for total, summand in zip(totals, summands, strict=True) if total.numel()]
    kinds: dict[object, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        kinds.setdefault((pair[0].dtype, pair[1].dtype) if _flat(*pair) else None, []).append(pair)
    if others := kinds.pop(None, ()):
        torch._foreach_add_([total for total, _ in others], [summand for _, summand in others])
    for alike in kinds.values():
        for first in range(0, len(alike), PAIRS):
            _launch(alike[first : first + PAIRS])


def _launch(pairs: list[tuple[Tensor, Tensor]]) -> None:
    filled = pairs + pairs[:1] * (PAIRS - len(pairs))
    counts = [total.numel() for total, _ in pairs]
    ends = list(accumulate(triton.cdiv(count, OPTIONS["BLOCK"]) for count in counts))
    starts = [0, *ends[:-1], *[ends[-1]] * (PAIRS - len(pairs))]  # no block is behind the last end
    totals, summands = zip(*filled, strict=True)
    _forward[(ends[-1],)](totals, summands, veiled(starts), veiled(counts + [0] * (PAIRS - len(pairs))), **OPTIONS)
    torch.autograd.graph.increment_version([total for total, _ in pairs])


def _flat(total: Tensor, summand: Tensor) -> bool:
    """Whether two tensors [...] are the same places of two pieces of memory without holes, which vectors can read."""
    return (
        total.dtype in _DTYPES
        and summand.dtype in _DTYPES
        and total.stride() == summand.stride()
        and total.shape == summand.shape
        and (total.is_contiguous() or (total.dim() > 1 and total.mT.is_contiguous()))
        and total.data_ptr() % _ALIGNED == 0 == summand.data_ptr() % _ALIGNED
    )
