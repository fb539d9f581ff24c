"""Section `bags`: whether bags add their rows one after the other and from zero, against gathers added in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu.claims import Bound, Claim
from gpu.setting import Setting
from schedc_runtime.moe.bags import Bags, combined, ended

CLAIMS = (
    Claim(
        "bags add their rows one after the other and from zero",
        "1, 33, 512 and 7168 columns in float32, bfloat16 and float64; bags of 0 to 40 rows",
        (Bound("bags_in_order", "==", True),),
        on_cpu=True,
        must=True,
    ),
)

LENGTHS = (0, 1, 2, 3, 8, 40)
"""Entries of bags; the last is longer than any warp is wide."""


def measure(setting: Setting) -> dict[str, Any]:
    results = {
        f"{str(dtype).removeprefix('torch.')}[{columns}]": in_order(setting, dtype, columns)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for columns in (1, 33, 512, setting.width)
    }
    return {"bags_in_order": all(results.values()), "bags": results}


def in_order(setting: Setting, dtype: torch.dtype, columns: int) -> bool:
    """Whether sums are those of adding in order, in float32 at least, rounded once to a nearest number.

    Halfway between two numbers of a narrow dtype both are nearest: some CPUs take the one, most devices the other.
    """
    generator = torch.Generator().manual_seed(columns)
    counts = torch.tensor(LENGTHS)[torch.randint(0, len(LENGTHS), (64,), generator=generator)]
    entries = int(counts.sum())
    summands = torch.randn(200, columns, generator=generator).mul_(torch.logspace(-3, 3, 200)[:, None])
    at = torch.randint(0, 200, (entries,), generator=generator)
    summands, at, counts = summands.to(setting.device, dtype), at.to(setting.device), counts.to(setting.device)
    # Entries behind the last offset belong to no bag.
    lists = ended(torch.cat([at, at[:5]]), functional.pad(counts.cumsum(0), (1, 0)), padded=True)
    exact = added(summands, at, counts.tolist())
    result = combined(summands, [Bags(*lists, len(counts))])
    missed = (result.to(exact.dtype) - exact).abs()
    return result.dtype == dtype and torch.equal(missed, (exact.to(dtype).to(exact.dtype) - exact).abs())


def added(summands: Tensor, at: Tensor, counts: list[int]) -> Tensor:
    """[bags, columns] the sums, an addition after the other, in float32 at least."""
    wide = torch.promote_types(summands.dtype, torch.float32)
    sums = summands.new_zeros(len(counts), summands.shape[1], dtype=wide)
    begin = 0
    for bag, count in enumerate(counts):
        for entry in range(begin, begin + count):
            sums[bag] += summands[at[entry]].to(wide)
        begin += count
    return sums
